"""POST /v1/responses: OpenAI's responses API, from body to task."""

from typing import Annotated, Any, Literal

import msgspec

from protocol.messages import ChatMessage, Sampling
from services.gateway.body import decode_body
from services.gateway.dialects.content import Part, refuse_media_alone
from services.gateway.dialects.conversations import Conversations
from services.gateway.dialects.items import TOOL_ITEMS, add_item, join_name, read_tools
from services.gateway.dialects.openai import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Count,
    Fields,
    SamplingFields,
    ToolChoice,
    choose_tools,
    list_stops,
    normalise_effort,
    read_drafting,
    read_sampling,
    read_schema,
    system_first,
)
from services.gateway.errors import ApiError, invalid, refuse_value
from services.gateway.task import PromptInput, Task, Thinking


class TextFormat(Fields, frozen=True, kw_only=True):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Fields, frozen=True, kw_only=True):
    """Options of the answer's text."""

    format: TextFormat | None = None


class ReasoningConfig(Fields, frozen=True, kw_only=True):
    """Options for the model's thinking."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields of a request."""

    input: str | Annotated[list[Any], msgspec.Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Count | None = None
    stop: str | list[str] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None
    stream_options: dict[str, Any] | None = None
    conversation: Any = None
    prompt: Any = None


def parse_responses(
    body: bytes, defaults: Sampling, conversations: Conversations, *, strict: bool = False
) -> tuple[Task, ResponsesRequest]:
    """Parse a body into a task; raises ApiError for what cannot be honoured."""
    request, unknown = decode_body(body, ResponsesRequest, strict=strict)
    if request.background:
        raise refuse_value("background", "background responses are not supported: wait, or stream")
    if request.conversation or request.prompt:
        where = "conversation" if request.conversation else "prompt"
        raise refuse_value(
            where, "only responses are stored on this server: use previous_response_id"
        )
    functions = read_tools(_list_tools(request), unknown)
    functions, must_call = choose_tools(functions, request.tool_choice, _full_name)
    reasoning = request.reasoning or ReasoningConfig()
    form = (request.text or TextConfig()).format or TextFormat()
    task = Task(
        prompts=[PromptInput(messages=_read_input(request, conversations, unknown))],
        model=request.model,
        sampling=read_sampling(request, defaults),
        max_tokens=request.max_output_tokens,
        stop=list_stops(request.stop),
        functions=functions,
        must_call=must_call,
        one_call=request.parallel_tool_calls is False,
        schema=read_schema(form.type, form.schema, "text.format"),
        thinking=Thinking(effort=normalise_effort(reasoning.effort)),
        stream=bool(request.stream),
        unknown=unknown,
        **read_drafting(request),
    )
    return task, request


def _read_input(
    request: ResponsesRequest, conversations: Conversations, unknown: list[str]
) -> list[ChatMessage]:
    """Return the conversation; instructions hold for this answer only and come first."""
    messages: list[ChatMessage] = []
    if request.instructions:
        messages.append(ChatMessage("system", request.instructions))
    if request.previous_response_id:
        earlier = conversations.find(request.previous_response_id)
        if earlier is None:
            reason = f"there is no response {request.previous_response_id!r} here (any more)"
            raise ApiError(
                404, reason, code="previous_response_not_found", param="previous_response_id"
            )
        messages += earlier
    items = _list_items(request)
    for item in items:
        is_reference = item.get("type") in (None, "item_reference")
        stored = conversations.item(str(item.get("id"))) if is_reference else None
        add_item(messages, stored or item, unknown)
    refuse_media_alone(items[-1].get("content") if items else None, "input")
    if not any(message.role != "system" for message in messages):
        raise invalid("input", "there is nothing to answer")
    return system_first(messages, unknown)


def _list_items(request: ResponsesRequest) -> list[Part]:
    """Return the items of the input; a text is a message of the user."""
    items = [request.input] if isinstance(request.input, str) else request.input
    return [item if isinstance(item, dict) else {"content": item} for item in items]


def _full_name(chosen: ToolChoice) -> str:
    return join_name(chosen.namespace, chosen.name)


def _list_tools(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the tools of the request, and those added during the conversation."""
    tools = list(request.tools or [])
    for item in _list_items(request):
        if item.get("type") in TOOL_ITEMS and isinstance(item.get("tools"), list):
            tools += [tool for tool in item["tools"] if isinstance(tool, dict)]
    return tools
