"""Replies to POST /v1/messages."""

import json
from dataclasses import dataclass
from typing import Any

from protocol.gateway import GatewaySettings
from services.gateway.dialects.base import Reading, Reply, encode_event
from services.gateway.dialects.messages import CALL_PREFIX, parse_messages
from services.gateway.errors import ApiError
from services.gateway.reasoning import Thought
from services.gateway.task import Choice
from services.gateway.tools.calls import ParsedCall
from services.gateway.transcript import Part, Piece

_NOTHING_COUNTED = {"input_tokens": 0, "output_tokens": 0}
"""Token counts while the model is being loaded."""

_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "cancelled": "end_turn",
}


@dataclass
class MessagesReply(Reply):
    """One message: blocks of thought, text and calls."""

    def __post_init__(self) -> None:
        self._index = -1
        """Index of the last block."""
        self._open = ""
        """Type of the open block; empty for none."""
        self._blanks = ""
        """Whitespace of a text block that has no other content so far."""
        self._begun = False

    def whole(self) -> dict[str, Any]:
        """Return the message; see `Reply`."""
        [choice] = self.choices
        blocks = [_make_block(part) for part in choice.transcript.parts if _shows(part)]
        return {
            **self._envelope(blocks),
            **_describe_end(choice),
            "usage": count_message_usage(choice),
        }

    def start(self) -> list[bytes]:
        """Return no events: `message_start` needs the prompt's token count; see `Reply`."""
        return [] if self.choices else self._begin(_NOTHING_COUNTED)

    def _begin(self, usage: dict[str, Any]) -> list[bytes]:
        """Return the first event, unless it was sent."""
        if self._begun:
            return []
        self._begun = True
        message = {
            **self._envelope([]),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return [self._encode("message_start", message=message)]

    def add(self, choice: Choice, piece: Piece) -> list[bytes]:
        """Return the events of a piece; see `Reply`."""
        sent = [event for part in piece.parts for event in self._send(part)]
        return [*self._begin(count_message_usage(choice)), *sent]

    def finish(self, choice: Choice, rest: Piece) -> list[bytes]:
        """Return the events that end the message; see `Reply`."""
        return [
            *self.add(choice, rest),
            *self._close(),
            self._encode(
                "message_delta", delta=_describe_end(choice), usage=count_message_usage(choice)
            ),
            self._encode("message_stop"),
        ]

    def keep_alive(self) -> bytes:
        """Return a ping, or the first event; see `Reply`."""
        return self._encode("ping")

    def fail(self, error: ApiError) -> list[bytes]:
        """Return the error event; see `Reply`."""
        return [encode_event(error.anthropic_body(), "error")]

    def _envelope(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.name}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
        }

    def _send(self, part: Part) -> list[bytes]:
        if isinstance(part, ParsedCall):
            block = {**_make_block(part), "input": {}}
            arguments = json.dumps(part.value, ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": arguments}
            return [*self._open_block("tool_use", block), self._delta(delta), *self._close()]
        if isinstance(part, Thought):
            delta = {"type": "thinking_delta", "thinking": part.text}
            return [*self._open_block("thinking", _make_block(Thought(""))), self._delta(delta)]
        text = part
        if self._open != "text":
            text = self._blanks + part
            self._blanks = "" if text.strip() else text
            if self._blanks:
                return []
        delta = {"type": "text_delta", "text": text}
        return [*self._open_block("text", _make_block("")), self._delta(delta)]

    def _open_block(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        """Return the events that open a block of this type."""
        if self._open == kind:
            return []
        closing = self._close()
        self._index += 1
        self._open, self._blanks = kind, ""
        opening = self._encode("content_block_start", index=self._index, content_block=block)
        return [*closing, opening]

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        self._open = ""
        return [self._encode("content_block_stop", index=self._index)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._encode("content_block_delta", index=self._index, delta=delta)

    @staticmethod
    def _encode(kind: str, **fields: Any) -> bytes:
        return encode_event({"type": kind, **fields}, kind)


def count_message_usage(choice: Choice) -> dict[str, Any]:
    """Return the token counts so far; cached prompt tokens are counted separately."""
    return {
        "input_tokens": choice.prompt_tokens - choice.cached_tokens,
        "output_tokens": choice.transcript.tokens,
        "cache_read_input_tokens": choice.cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _describe_end(choice: Choice) -> dict[str, Any]:
    end = choice.end
    if choice.transcript.has_whole_calls and end.reason == "stop":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if end.stop_string:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_string}
    return {"stop_reason": _REASONS[end.reason], "stop_sequence": None}


def _shows(part: Part) -> bool:
    return not isinstance(part, str) or bool(part.strip())


def _make_block(part: Part) -> dict[str, Any]:
    match part:
        case ParsedCall():
            return {
                "type": "tool_use",
                "id": CALL_PREFIX + part.id,
                "name": part.name,
                "input": part.value,
            }
        case Thought():
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case _:
            return {"type": "text", "text": part}


def read_messages(body: bytes, settings: GatewaySettings) -> Reading:
    """Parse a request to this API; raises ApiError for what cannot be honoured."""
    task = parse_messages(body, settings.sampling, strict=settings.strict)
    return Reading(task, MessagesReply)
