"""Answers in OpenAI's words: whole, or as the chunks of a stream."""

import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from protocol.messages import Finished, Generate, Logprobs, ShownToken, Status
from services.gateway.figures import speculation, timings, usage
from services.gateway.transcript import Piece, Transcript

_REASONS = {"stop": "stop", "length": "length", "context": "length", "cancelled": "stop"}


@dataclass
class Reply(ABC):
    """What both kinds of answer share."""

    request: Generate
    status: Status
    model: str
    include_usage: bool = False
    include_origins: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: secrets.token_hex(12))

    prefix = ""
    whole_kind = ""
    chunk_kind = ""

    def whole(self, transcript: Transcript, finished: Finished) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        transcript.end()
        body = self._envelope(self.whole_kind, [self._choice(transcript, finished)])
        return {**body, **self._figures(transcript, finished), **self._usage(transcript, finished)}

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first token."""
        return []

    def shows(self, piece: Piece) -> bool:
        """Whether a chunk of this piece would say anything."""
        said = piece.content or piece.calls or piece.logprobs
        return bool(said) or (self.include_origins and bool(piece.origins))

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The chunk of a piece."""
        body = self._chunk(self._delta(piece), None)
        if self.include_origins:
            body["ssd"] = {"origins": piece.origins}
        return body

    def closing(self, transcript: Transcript, finished: Finished) -> list[dict[str, Any]]:
        """The chunks after the last token."""
        rest = transcript.end()
        chunks = [self.chunk(rest)] if self.shows(rest) else []
        last = self._chunk(self._delta(None), self._reason(transcript, finished))
        last.update(self._figures(transcript, finished))
        if not self.include_usage:
            return [*chunks, last]
        counts = {**self._envelope(self.chunk_kind, []), **self._usage(transcript, finished)}
        return [*chunks, last, counts]

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}{self.name}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        body = self._envelope(self.chunk_kind, [{"index": 0, **delta, "finish_reason": reason}])
        return {**body, "usage": None} if self.include_usage else body

    def _figures(self, transcript: Transcript, finished: Finished) -> dict[str, Any]:
        return {
            "timings": timings(finished, transcript.tokens, self.status),
            "ssd": speculation(finished, self.request),
        }

    @staticmethod
    def _usage(transcript: Transcript, finished: Finished) -> dict[str, Any]:
        return {"usage": usage(finished, transcript.tokens)}

    @staticmethod
    def _reason(transcript: Transcript, finished: Finished) -> str:
        called = transcript.calls and finished.reason == "stop"
        return "tool_calls" if called else _REASONS[finished.reason]

    @abstractmethod
    def _choice(self, transcript: Transcript, finished: Finished) -> dict[str, Any]:
        """The one choice of a whole answer."""

    @abstractmethod
    def _delta(self, piece: Piece | None) -> dict[str, Any]:
        """What a chunk's choice holds besides its index and reason; None is the last chunk."""


class ChatReply(Reply):
    """To POST /v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """Says who speaks."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, None)]

    def _choice(self, transcript: Transcript, finished: Finished) -> dict[str, Any]:
        content = transcript.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if transcript.calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = [call.body() for call in transcript.calls]
        return {
            "index": 0,
            "message": message,
            "logprobs": self._chances(transcript.logprobs),
            "finish_reason": self._reason(transcript, finished),
        }

    def _delta(self, piece: Piece | None) -> dict[str, Any]:
        if piece is None:
            return {"delta": {}, "logprobs": None}
        delta: dict[str, Any] = {"content": piece.content} if piece.content else {}
        if piece.calls:
            numbered = enumerate(piece.calls, start=piece.first_call)
            delta["tool_calls"] = [{"index": index, **call.body()} for index, call in numbered]
        return {"delta": delta, "logprobs": self._chances(piece.logprobs)}

    def _chances(self, entries: list[Logprobs]) -> dict[str, Any] | None:
        if self.request.sampling.logprobs is None:
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
    _offset = 0
    """Characters of the answer that were said already."""

    def _choice(self, transcript: Transcript, finished: Finished) -> dict[str, Any]:
        return {
            "index": 0,
            "text": transcript.content,
            "logprobs": self._chances(transcript.logprobs),
            "finish_reason": self._reason(transcript, finished),
        }

    def _delta(self, piece: Piece | None) -> dict[str, Any]:
        if piece is None:
            return {"text": "", "logprobs": None}
        return {"text": piece.content, "logprobs": self._chances(piece.logprobs)}

    def _chances(self, entries: list[Logprobs]) -> dict[str, Any] | None:
        if self.request.sampling.logprobs is None:
            return None
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.chosen.text)
        return {
            "tokens": [entry.chosen.text for entry in entries],
            "token_logprobs": [entry.chosen.logprob for entry in entries],
            "top_logprobs": [{t.text: t.logprob for t in entry.best} for entry in entries],
            "text_offset": offsets,
        }
