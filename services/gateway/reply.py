"""Answers in OpenAI's words: whole, or as the chunks of a stream."""

import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from protocol.messages import Finished, Generate, Status
from services.gateway.figures import speculation, timings, usage
from services.gateway.transcript import Piece, Transcript

_REASONS = {"stop": "stop", "length": "length", "context": "length"}


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
        body = self._envelope(self.whole_kind, [self._choice(transcript, finished)])
        return {**body, **self._figures(transcript, finished), **self._usage(transcript, finished)}

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first token."""
        return []

    def shows(self, piece: Piece) -> bool:
        """Whether a chunk of this piece would say anything."""
        return bool(piece.content) or (self.include_origins and bool(piece.origins))

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The chunk of a piece."""
        body = self._chunk(self._delta(piece), None)
        if self.include_origins:
            body["ssd"] = {"origins": piece.origins}
        return body

    def closing(self, transcript: Transcript, finished: Finished) -> list[dict[str, Any]]:
        """The chunks after the last token."""
        last = self._chunk(self._delta(None), self._reason(transcript, finished))
        last.update(self._figures(transcript, finished))
        if not self.include_usage:
            return [last]
        counts = {**self._envelope(self.chunk_kind, []), **self._usage(transcript, finished)}
        return [last, counts]

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
        del transcript
        return _REASONS[finished.reason]

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
        message = {"role": "assistant", "content": transcript.content, "refusal": None}
        return {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self._reason(transcript, finished),
        }

    def _delta(self, piece: Piece | None) -> dict[str, Any]:
        delta = {"content": piece.content} if piece and piece.content else {}
        return {"delta": delta, "logprobs": None}


class CompletionReply(Reply):
    """To POST /v1/completions."""

    prefix = "cmpl-"
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def _choice(self, transcript: Transcript, finished: Finished) -> dict[str, Any]:
        return {
            "index": 0,
            "text": transcript.content,
            "logprobs": None,
            "finish_reason": self._reason(transcript, finished),
        }

    def _delta(self, piece: Piece | None) -> dict[str, Any]:
        return {"text": piece.content if piece else "", "logprobs": None}
