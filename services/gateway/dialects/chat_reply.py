"""Replies to POST /v1/chat/completions, and code shared with text completions."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from protocol.gateway import GatewaySettings
from protocol.messages import Logprobs, ShownToken
from services.gateway.dialects.base import Reading, Reply, encode_event
from services.gateway.dialects.chat import StreamOptions, parse_chat
from services.gateway.dialects.openai import count_usage, report_speculation, report_timings
from services.gateway.errors import ApiError, refuse_value
from services.gateway.task import Choice
from services.gateway.tools.calls import ParsedCall
from services.gateway.transcript import Piece

_REASONS = {"stop": "stop", "length": "length", "context": "length", "cancelled": "stop"}
DONE = b"data: [DONE]\n\n"
_MOST_KEPT = 64 * 1024**2
"""Most bytes of log-probabilities that are kept for a non-streaming answer."""


class ShownLogprobs(NamedTuple):
    """The log-probabilities of one token, encoded as they arrive: an answer has many."""

    token: str
    logprob: float
    best: msgspec.Raw
    """The encoded best tokens; for chats, the whole encoded entry."""


@dataclass
class CompletionsReply(Reply):
    """Base of the replies to chat and text completions: parallel choices, chunks, usage."""

    prompts: int = 1
    answers: int = 1
    """Number of answers to all prompts together."""
    options: StreamOptions = field(default_factory=StreamOptions)

    _kept: dict[int, list[ShownLogprobs]] = field(
        default_factory=lambda: defaultdict(list), init=False
    )
    """Log-probabilities that a non-streaming answer shows, by choice."""
    _kept_bytes: int = field(default=0, init=False)

    prefix = ""
    whole_kind = ""
    chunk_kind = ""

    def whole(self) -> dict[str, Any]:
        """Return the body; see `Reply`."""
        entries = [self._entry(choice) for choice in self.choices]
        body = {**self._envelope(self.whole_kind, entries), "usage": self._usage()}
        if len(self.choices) == 1:
            return {**body, **self._figures(self.choices[0])}
        for entry, choice in zip(entries, self.choices, strict=True):
            entry.update(self._figures(choice))
        return body

    def collect(self, choice: Choice, piece: Piece) -> None:
        """Keep the log-probabilities; see `Reply`. Raises ApiError if there are too many."""
        shown = self._show_all(piece.logprobs)
        self._kept[choice.index] += shown
        self._kept_bytes += sum(len(bytes(entry.best)) for entry in shown)
        if self._kept_bytes > _MOST_KEPT:
            raise refuse_value(
                "logprobs",
                f"more than {_MOST_KEPT} bytes of them are only streamed: set `stream`",
            )

    def _show_all(self, entries: Sequence[Logprobs]) -> list[ShownLogprobs]:
        return [self._show(entry) for entry in entries] if self._wants_logprobs else []

    def add(self, choice: Choice, piece: Piece) -> list[bytes]:
        """Return the chunks of a piece; see `Reply`."""
        shows = piece.parts or piece.logprobs or (self.options.include_origins and piece.origins)
        if not shows:
            return []
        body = self._chunk(choice.index, self._delta(choice, piece), None)
        if self.options.include_origins:
            body["ssd"] = {"origins": piece.origins}
        return [encode_event(body)]

    def finish(self, choice: Choice, rest: Piece) -> list[bytes]:
        """Return a choice's last chunk; see `Reply`."""
        last = self._chunk(choice.index, self._delta(choice, None), self._reason(choice))
        return [*self.add(choice, rest), encode_event({**last, **self._figures(choice)})]

    def end(self) -> list[bytes]:
        """Return the usage chunk and the end mark; see `Reply`."""
        if not self.options.include_usage:
            return [DONE]
        counts = {**self._envelope(self.chunk_kind, []), "usage": self._usage()}
        return [encode_event(counts), DONE]

    def fail(self, error: ApiError) -> list[bytes]:
        """Return the error event; see `Reply`."""
        return [encode_event(error.body()), DONE]

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
        return {**body, "usage": None} if self.options.include_usage else body

    def _figures(self, choice: Choice) -> dict[str, Any]:
        return {
            "timings": report_timings(choice.end, choice.transcript.tokens),
            "ssd": report_speculation(choice.end, choice.request),
        }

    def _usage(self) -> dict[str, Any]:
        return count_usage(self.choices, prompts=self.prompts)

    def _reason(self, choice: Choice) -> str:
        return finish_reason(choice)

    @property
    def _wants_logprobs(self) -> bool:
        return self.choices[0].request.sampling.logprobs is not None

    @abstractmethod
    def _show(self, entry: Logprobs) -> ShownLogprobs:
        """Return the log-probabilities of a token in this API's format."""

    @abstractmethod
    def _entry(self, choice: Choice) -> dict[str, Any]:
        """Return a choice of a whole answer."""

    @abstractmethod
    def _delta(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        """Return a chunk's other fields; `piece` is None for the last chunk."""


def finish_reason(choice: Choice) -> str:
    """Return why an answer ended, in OpenAI's terms."""
    called = choice.transcript.has_whole_calls and choice.end.reason == "stop"
    return "tool_calls" if called else _REASONS[choice.end.reason]


@dataclass
class ChatReply(CompletionsReply):
    """Reply to POST /v1/chat/completions."""

    calls_functions: bool = False
    """True to report calls in the older format, `function_call` instead of `tool_calls`."""

    prefix = "chatcmpl-"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def start(self) -> list[bytes]:
        """Return the chunks with the roles; see `Reply`."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [encode_event(self._chunk(index, delta, None)) for index in range(self.answers)]

    def _entry(self, choice: Choice) -> dict[str, Any]:
        transcript = choice.transcript
        content: str | None = transcript.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if transcript.reasoning:
            message["reasoning_content"] = transcript.reasoning
        if transcript.calls:
            message["content"] = transcript.content.strip() or None
            calls = [describe_call(call) for call in transcript.calls]
            message |= self._name_calls(calls)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(self._kept[choice.index]),
            "finish_reason": self._reason(choice),
        }

    def _name_calls(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        if self.calls_functions:
            return {"function_call": calls[0]["function"]}
        return {"tool_calls": calls}

    def _reason(self, choice: Choice) -> str:
        reason = super()._reason(choice)
        return "function_call" if self.calls_functions and reason == "tool_calls" else reason

    def _delta(self, choice: Choice, piece: Piece | None) -> dict[str, Any]:
        del choice
        if piece is None:
            return {"delta": {}, "logprobs": None}
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:
            numbered = enumerate(piece.calls, start=piece.first_call)
            delta |= self._name_calls([{"index": i, **describe_call(c)} for i, c in numbered])
        return {"delta": delta, "logprobs": self._logprobs(self._show_all(piece.logprobs))}

    def _show(self, entry: Logprobs) -> ShownLogprobs:
        best = [_show_token(token) for token in entry.best]
        shown = msgspec.json.encode({**_show_token(entry.chosen), "top_logprobs": best})
        return ShownLogprobs(entry.chosen.text, entry.chosen.logprob, msgspec.Raw(shown))

    def _logprobs(self, shown: list[ShownLogprobs]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return {"content": [entry.best for entry in shown], "refusal": None}


def read_chat(body: bytes, settings: GatewaySettings) -> Reading:
    """Parse a request to this API; raises ApiError for what cannot be honoured."""
    task, request = parse_chat(body, settings.sampling, strict=settings.strict)

    def make_reply(model: str) -> Reply:
        return ChatReply(
            model,
            answers=task.choices,
            options=request.stream_options or StreamOptions(),
            calls_functions=bool(request.functions),
        )

    return Reading(task, make_reply)


def describe_call(call: ParsedCall) -> dict[str, Any]:
    """Return a call in the format of OpenAI's chat API."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _show_token(token: ShownToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": token.data}
