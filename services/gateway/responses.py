"""Answers in OpenAI's words: whole, or as the chunks of a stream."""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

from msgspec.structs import replace

from protocol.errors import RuntimeFailure
from protocol.messages import Finished, Generate, Logprobs, ShownToken, Status
from services.gateway.transcript import Piece, Transcript

T = TypeVar("T")

_REASONS = {"stop": "stop", "length": "length", "context": "length", "cancelled": "stop"}


@dataclass
class Choice:
    """One of the answers to a request, as far as it has come."""

    index: int
    request: Generate
    transcript: Transcript
    finished: Finished | None = None

    @property
    def end(self) -> Finished:
        """How it ended; raises RuntimeFailure before that."""
        if self.finished is None:
            raise RuntimeFailure("the answer ended without its last message")
        return self.finished


def expand_choices(generate: Generate, n: int) -> list[Generate]:
    """The request `n` times, each with a seed of its own: the first one's plus its index."""
    sampling = generate.sampling
    seeds = [(sampling.seed + index) % 2**63 for index in range(n)]
    return [replace(generate, sampling=replace(sampling, seed=seed)) for seed in seeds]


async def merge(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """What all sources say, as it comes, each with the number of its source.

    The first failure ends all of them. However it ends, all sources have been closed then.
    """
    waiting = {asyncio.ensure_future(anext(source)): n for n, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(sources[number]))] = number
                yield number, event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


@dataclass
class Reply(ABC):
    """What both kinds of answer share."""

    choices: list[Choice]
    status: Status
    model: str
    include_usage: bool = False
    include_origins: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: secrets.token_hex(12))

    prefix = ""
    whole_kind = ""
    chunk_kind = ""

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        for choice in self.choices:
            choice.transcript.end()
        told = [self._choice(choice) for choice in self.choices]
        body = {**self._envelope(self.whole_kind, told), "usage": self._usage()}
        if len(self.choices) == 1:
            return {**body, **self._figures(self.choices[0])}
        for one, choice in zip(told, self.choices, strict=True):
            one.update(self._figures(choice))
        return body

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first token."""
        return []

    def shows(self, piece: Piece) -> bool:
        """Whether a chunk of this piece would say anything."""
        said = piece.content or piece.calls or piece.logprobs
        return bool(said) or (self.include_origins and bool(piece.origins))

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """The chunk of a piece."""
        body = self._chunk(choice.index, self._delta(choice, piece), None)
        if self.include_origins:
            body["ssd"] = {"origins": piece.origins}
        return body

    def closing(self, choice: Choice) -> list[dict[str, Any]]:
        """The chunks after a choice's last token."""
        rest = choice.transcript.end()
        chunks = [self.chunk(choice, rest)] if self.shows(rest) else []
        last = self._chunk(choice.index, self._delta(choice, None), _reason(choice))
        return [*chunks, {**last, **self._figures(choice)}]

    def counts(self) -> list[dict[str, Any]]:
        """The chunk at the very end, if it is wanted."""
        if not self.include_usage:
            return []
        return [{**self._envelope(self.chunk_kind, []), "usage": self._usage()}]

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}{self.name}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, **delta, "finish_reason": reason}
        body = self._envelope(self.chunk_kind, [choice])
        return {**body, "usage": None} if self.include_usage else body

    def _figures(self, choice: Choice) -> dict[str, Any]:
        return {
            "timings": timings(choice.end, choice.transcript.tokens, self.status),
            "ssd": speculation(choice.end, choice.request),
        }

    def _usage(self) -> dict[str, Any]:
        return usage(self.choices[0].end, sum(choice.transcript.tokens for choice in self.choices))

    @property
    def _tells_logprobs(self) -> bool:
        return self.choices[0].request.sampling.logprobs is not None

    @abstractmethod
    def _choice(self, choice: Choice) -> dict[str, Any]:
        """A choice of a whole answer."""

    @abstractmethod
    def _delta(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        """What a chunk's choice holds besides its index and reason; None is the last chunk."""


def _reason(choice: Choice) -> str:
    called = choice.transcript.calls and choice.end.reason == "stop"
    return "tool_calls" if called else _REASONS[choice.end.reason]


class ChatReply(Reply):
    """To POST /v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """Says who speaks."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(choice.index, delta, None) for choice in self.choices]

    def _choice(self, choice: Choice) -> dict[str, Any]:
        transcript = choice.transcript
        content = transcript.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if transcript.calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = [call.body() for call in transcript.calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._chances(transcript.logprobs),
            "finish_reason": _reason(choice),
        }

    def _delta(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        del choice
        if piece is None:
            return {"delta": {}, "logprobs": None}
        delta: dict[str, Any] = {"content": piece.content} if piece.content else {}
        if piece.calls:
            numbered = enumerate(piece.calls, start=piece.first_call)
            delta["tool_calls"] = [{"index": index, **call.body()} for index, call in numbered]
        return {"delta": delta, "logprobs": self._chances(piece.logprobs)}

    def _chances(self, entries: list[Logprobs]) -> dict[str, Any] | None:
        if not self._tells_logprobs:
            return None
        content = [
            {**_chance(entry.chosen), "top_logprobs": [_chance(token) for token in entry.best]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}


def _chance(token: ShownToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": token.data}


class CompletionReply(Reply):
    """To POST /v1/completions."""

    prefix = "cmpl-"
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.transcript.content,
            "logprobs": self._chances(choice.transcript.logprobs, 0),
            "finish_reason": _reason(choice),
        }

    def _delta(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        if piece is None:
            return {"text": "", "logprobs": None}
        known = choice.transcript.logprobs
        before = known[: len(known) - len(piece.logprobs)]
        said = sum(len(entry.chosen.text) for entry in before)
        return {"text": piece.content, "logprobs": self._chances(piece.logprobs, said)}

    def _chances(self, entries: list[Logprobs], said: int) -> dict[str, Any] | None:
        """`said`: characters of the answer before these."""
        if not self._tells_logprobs:
            return None
        ends = accumulate((len(entry.chosen.text) for entry in entries), initial=said)
        return {
            "tokens": [entry.chosen.text for entry in entries],
            "token_logprobs": [entry.chosen.logprob for entry in entries],
            "top_logprobs": [{t.text: t.logprob for t in entry.best} for entry in entries],
            "text_offset": list(ends)[:-1],
        }


def usage(finished: Finished, tokens: int) -> dict[str, Any]:
    """Token counts."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": finished.prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }


def timings(finished: Finished, tokens: int, status: Status) -> dict[str, Any]:
    """Times in ms, speeds in tokens per second; `predicted` is what was decoded."""
    s = finished.statistics
    prompt_ms = s.phase_ms.get("prefill_verifier", 0.0)
    fresh = finished.prompt_tokens - finished.cached_tokens
    drafter = next((service for service in status.services if service.role == "drafter"), None)
    return {
        "prompt_n": fresh,
        "cache_n": finished.cached_tokens,
        "prompt_ms": prompt_ms,
        "prompt_per_second": 1e3 * fresh / prompt_ms if prompt_ms else 0.0,
        "predicted_n": tokens,
        "predicted_ms": 1e3 * s.decode_s,
        "predicted_per_second": s.tok_s,
        "draft_n": s.drafted,
        "draft_n_accepted": s.accepted,
        "draft_rounds": s.rounds - s.plain_rounds,
        "draft_kind": drafter.backend if drafter and s.drafted else None,
    }


def speculation(finished: Finished, request: Generate) -> dict[str, Any]:
    """How speculation went; definitions: docs/guide/statistics.md."""
    s = finished.statistics
    return {
        "mode": request.mode,
        "seed": request.sampling.seed,
        "ttft_ms": s.ttft_ms,
        "rounds": s.rounds,
        "acceptance_rate": s.acceptance_rate,
        "mean_acceptance_length": s.mean_acceptance_length,
        "cache_hits": s.cache_hits,
        "cache_misses": s.cache_misses,
        "overlap_ratio": s.overlap_ratio,
        "draft_wait_ms": s.phase_ms.get("draft_wait", 0.0),
        "verify_ms": s.phase_ms.get("verify", 0.0),
        "fallbacks": s.fallbacks,
        "predicted_tok_s": s.predicted_tok_s,
        "plain_tok_s": s.plain_tok_s,
    }
