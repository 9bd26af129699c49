"""Replies to POST /v1/responses: items of thought, text and calls."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace as replace_fields

from protocol.gateway import GatewaySettings
from protocol.messages import ChatMessage
from services.gateway.dialects.base import Reading, Reply, encode_event
from services.gateway.dialects.conversations import Conversations
from services.gateway.dialects.items import CALL_PREFIX, join_name
from services.gateway.dialects.openai import describe_call
from services.gateway.dialects.responses import ResponsesRequest, parse_responses
from services.gateway.errors import ApiError
from services.gateway.reasoning import Thought
from services.gateway.task import Choice, Task
from services.gateway.tools.calls import ParsedCall
from services.gateway.transcript import Part, Piece


@dataclass(kw_only=True)
class ResponsesReply(Reply):
    """One response."""

    request: ResponsesRequest
    task: Task
    conversations: Conversations
    items: list[dict[str, Any]] = field(default_factory=list)
    """Completed items."""

    streamed_refusals = frozenset({"context_length_exceeded"})

    def __post_init__(self) -> None:
        self._numbers = 0
        self._open: Part | None = None
        """The open item, with its contents so far."""
        self._item_id = ""
        self._blanks = ""

    def whole(self) -> dict[str, Any]:
        """Return the response; see `Reply`."""
        [choice] = self.choices
        parts = [part for part in choice.transcript.parts if _shows(part)]
        self.items = [self._make_item(part, f"{self.name}{n}") for n, part in enumerate(parts)]
        return self._complete(choice)

    def start(self) -> list[bytes]:
        """Return the first events; see `Reply`."""
        body = self._body("in_progress")
        return [self._event("created", response=body), self._event("in_progress", response=body)]

    def add(self, choice: Choice, piece: Piece) -> list[bytes]:
        """Return the events of a piece; see `Reply`."""
        del choice
        return [event for part in piece.parts for event in self._send(part)]

    def finish(self, choice: Choice, rest: Piece) -> list[bytes]:
        """Return the events that end the response; see `Reply`."""
        events = [*self.add(choice, rest), *self._close()]
        body = self._complete(choice)
        return [*events, self._event(body["status"], response=body)]

    def keep_alive(self) -> bytes:
        """Return an event, since clients give up on a stream without one for minutes."""
        return self._event("in_progress", response=self._body("in_progress"))

    def fail(self, error: ApiError) -> list[bytes]:
        """Return the error event; see `Reply`."""
        body = self._body("failed")
        body["error"] = {"code": error.code or "server_error", "message": error.message}
        return [self._event("failed", response=body)]

    # ------------------------------------------------------------ the whole

    def _complete(self, choice: Choice) -> dict[str, Any]:
        body = self._body("incomplete" if choice.is_limited else "completed")
        if choice.is_limited:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        end, tokens = choice.end, choice.transcript.tokens
        body["usage"] = {
            "input_tokens": end.prompt_tokens,
            "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": choice.transcript.reasoning_tokens},
            "total_tokens": end.prompt_tokens + tokens,
        }
        if self.request.store is not False:
            self.conversations.keep(body["id"], self._conversation(choice), body)
        return body

    def _body(self, status: str) -> dict[str, Any]:
        request = self.request
        text = request.text.format if request.text else None
        echo = {"instructions", "previous_response_id", "max_output_tokens", "top_p", "temperature"}
        return {
            "id": f"resp_{self.name}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": list(self.items),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning": msgspec.to_builtins(request.reasoning)
            or {"effort": None, "summary": None},
            "store": request.store is not False,
            "text": {"format": _without_none(text) or {"type": "text"}},
            "tool_choice": _without_none(request.tool_choice) or "auto",
            "tools": request.tools or [],
            "truncation": "disabled",
            "usage": None,
            "metadata": request.metadata or {},
            **{name: getattr(request, name) for name in sorted(echo)},
        }

    def _conversation(self, choice: Choice) -> list[ChatMessage]:
        """Return all turns up to this answer's; the instructions held for it only."""
        messages = list(self.task.prompts[0].messages)
        if self.request.instructions and messages[0].role == "system":
            rest = messages[0].content.removeprefix(self.request.instructions).lstrip("\n")
            messages[:1] = [replace_fields(messages[0], content=rest)] if rest else []
        transcript = choice.transcript
        calls = [describe_call(call.id, call.name, call.value) for call in transcript.calls]
        answer = ChatMessage(
            "assistant",
            transcript.content,
            tool_calls=calls,
            reasoning_content=transcript.reasoning,
        )
        return [*messages, answer]

    def _make_item(self, part: Part, item_id: str) -> dict[str, Any]:
        match part:
            case Thought():
                return {
                    "type": "reasoning",
                    "id": f"rs_{item_id}",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": part.text}],
                    "status": "completed",
                }
            case ParsedCall():
                return self._make_call(part, item_id)
            case _:
                return {
                    "type": "message",
                    "id": f"msg_{item_id}",
                    "role": "assistant",
                    "status": "completed",
                    "content": [_make_text(part)],
                }

    def _make_call(self, call: ParsedCall, item_id: str) -> dict[str, Any]:
        status = "completed" if call.complete else "incomplete"
        function = next((f for f in self.task.functions if f.name == call.name), None)
        shared = {"call_id": CALL_PREFIX + call.id, "name": call.name, "status": status}
        if function is not None and function.namespace:
            shared["name"] = call.name.removeprefix(join_name(function.namespace, ""))
            shared["namespace"] = function.namespace
        if function is not None and function.freeform:
            text = str(call.value.get("input", ""))
            return {"type": "custom_tool_call", "id": f"ctc_{item_id}", "input": text, **shared}
        item = {"type": "function_call", "id": f"fc_{item_id}", "arguments": call.arguments}
        return {**item, **shared}

    # ------------------------------------------------------------ the stream

    def _send(self, part: Part) -> list[bytes]:
        if isinstance(part, ParsedCall):
            return [*self._close(), *self._send_call(part)]
        text = part.text if isinstance(part, Thought) else part
        if type(self._open) is type(part):
            opening: list[bytes] = []
        else:
            text = text if isinstance(part, Thought) else self._blanks + text
            self._blanks = "" if text.strip() else text
            if self._blanks:
                return []
            opening = self._open_item(part)
        self._open = _append(self._open, text)
        kind = "reasoning_text" if isinstance(part, Thought) else "output_text"
        more: dict[str, Any] = {} if isinstance(part, Thought) else {"logprobs": []}
        return [*opening, self._part_event(f"{kind}.delta", delta=text, **more)]

    def _send_call(self, call: ParsedCall) -> list[bytes]:
        item = self._make_item(call, self._new_id())
        freeform = item["type"] == "custom_tool_call"
        name = "input" if freeform else "arguments"
        kind = "custom_tool_call_input" if freeform else "function_call_arguments"
        blank = {**item, name: "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": len(self.items)}
        done = {name: item[name]} if freeform else {name: item[name], "name": item["name"]}
        events = [
            self._event("output_item.added", output_index=len(self.items), item=blank),
            self._event(f"{kind}.delta", **place, delta=item[name]),
            self._event(f"{kind}.done", **place, **done),
            self._event("output_item.done", output_index=len(self.items), item=item),
        ]
        self.items.append(item)
        return events

    def _open_item(self, part: Part) -> list[bytes]:
        """Return the events that start an item of this kind."""
        closing = self._close()
        self._open = Thought("") if isinstance(part, Thought) else ""
        item = self._make_item(self._open, self._new_id())
        self._item_id = item["id"]
        content = item["content"][0]
        blank = {**item, "content": [], "status": "in_progress"}
        return [
            *closing,
            self._event("output_item.added", output_index=len(self.items), item=blank),
            self._part_event("content_part.added", part=content),
        ]

    def _close(self) -> list[bytes]:
        """Return the events that end the open item."""
        if self._open is None:
            return []
        item = {**self._make_item(self._open, ""), "id": self._item_id}
        content = item["content"][0]
        thought = isinstance(self._open, Thought)
        kind = "reasoning_text" if thought else "output_text"
        more: dict[str, Any] = {} if thought else {"logprobs": []}
        events = [
            self._part_event(f"{kind}.done", text=content["text"], **more),
            self._part_event("content_part.done", part=content),
            self._event("output_item.done", output_index=len(self.items), item=item),
        ]
        self.items.append(item)
        self._open = None
        return events

    def _new_id(self) -> str:
        return f"{self.name}{len(self.items)}"

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._item_id, "output_index": len(self.items), "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        body = {"type": name, "sequence_number": self._numbers, **fields}
        self._numbers += 1
        return encode_event(body, name)


def read_responses(body: bytes, settings: GatewaySettings, conversations: Conversations) -> Reading:
    """Parse a request to this API; raises ApiError for what cannot be honoured."""
    task, request = parse_responses(body, settings.sampling, conversations, strict=settings.strict)

    def make_reply(model: str) -> Reply:
        return ResponsesReply(model=model, request=request, task=task, conversations=conversations)

    return Reading(task, make_reply)


def _shows(part: Part) -> bool:
    return not isinstance(part, str) or bool(part.strip())


def _append(part: Part | None, text: str) -> Part:
    return Thought(part.text + text) if isinstance(part, Thought) else f"{part or ''}{text}"


def _make_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _without_none(fields: Any) -> Any:
    """Convert a struct to JSON without the fields that are None."""
    plain = msgspec.to_builtins(fields)
    if not isinstance(plain, dict):
        return plain
    return {name: value for name, value in plain.items() if value not in (None, [])}
