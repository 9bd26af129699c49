"""POST /v1/responses: OpenAI's newest API, from a body to a task."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from protocol.messages import ChatMessage, Sampling
from services.gateway.body import check_free_form, decode_body, to_field_error
from services.gateway.dialects.conversations import Conversations
from services.gateway.dialects.openai import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ContentPart,
    Count,
    Fields,
    FunctionName,
    SamplingFields,
    choose_functions,
    describe_call,
    join_text,
    list_stops,
    normalise_effort,
    read_drafting,
    read_sampling,
    system_first,
)
from services.gateway.errors import ApiError, invalid, refuse_value
from services.gateway.task import PromptInput, Task, Thinking
from services.gateway.tools.calls import ToolFunction

CALL_PREFIX = "call_"


class InputItem(Fields, frozen=True, kw_only=True):
    """A turn of the conversation; which fields there are depends on its type."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None


class ResponsesTool(Fields, frozen=True, kw_only=True):
    """A tool; functions and custom tools can be called here."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ResponsesToolChoice(Fields, frozen=True, kw_only=True):
    """The one tool that must be called, or those that may be."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list["ResponsesToolChoice"] = msgspec.field(default_factory=list)


class TextFormat(Fields, frozen=True, kw_only=True):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Fields, frozen=True, kw_only=True):
    """How the answer's text is to be."""

    format: TextFormat | None = None


class ReasoningConfig(Fields, frozen=True, kw_only=True):
    """How much the model is to think."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields of a request."""

    input: str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Count | None = None
    stop: str | list[str] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None
    stream_options: dict[str, Any] | None = None


def parse_responses(
    body: bytes, defaults: Sampling, conversations: Conversations, *, strict: bool = False
) -> tuple[Task, ResponsesRequest]:
    """The task in a body; raises ApiError for what cannot be honoured."""
    request, unknown = decode_body(body, ResponsesRequest, strict=strict)
    if request.background:
        raise refuse_value("background", "there is no background here: wait, or stream")
    functions, must_call = _choose_tools(request, unknown)
    reasoning = request.reasoning or ReasoningConfig()
    task = Task(
        prompts=[PromptInput(messages=_read_input(request, conversations, unknown))],
        model=request.model,
        sampling=read_sampling(request, defaults),
        max_tokens=request.max_output_tokens,
        stop=list_stops(request.stop),
        functions=functions,
        must_call=must_call,
        one_call=request.parallel_tool_calls is False,
        schema=_read_schema(request.text),
        thinking=Thinking(effort=normalise_effort(reasoning.effort)),
        stream=bool(request.stream),
        unknown=unknown,
        **read_drafting(request),
    )
    return task, request


def _read_input(
    request: ResponsesRequest, conversations: Conversations, unknown: list[str]
) -> list[ChatMessage]:
    """The conversation; instructions hold for this answer only and come first."""
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
    if isinstance(request.input, str):
        messages.append(ChatMessage("user", request.input))
    else:
        for index, item in enumerate(request.input):
            _add_item(messages, item, f"input[{index}]", unknown)
    if not any(message.role != "system" for message in messages):
        raise invalid("input", "there is nothing to answer")
    return system_first(messages)


def _add_item(messages: list[ChatMessage], item: InputItem, where: str, unknown: list[str]) -> None:
    """Add an item; what the assistant thought, said and called in a row is one message."""
    match item.type:
        case "message":
            role = "system" if item.role == "developer" else item.role or "user"
            message = ChatMessage(role, join_text(item.content, where))
        case "reasoning":
            thought = join_text(item.content or item.summary, where)
            message = ChatMessage("assistant", "", reasoning_content=thought)
        case "function_call" | "custom_tool_call":
            arguments = item.arguments or "" if item.input is None else {"input": item.input}
            call_id = (item.call_id or "").removeprefix(CALL_PREFIX)
            call = describe_call(call_id, item.name or "", arguments)
            message = ChatMessage("assistant", "", tool_calls=[call])
        case "function_call_output" | "custom_tool_call_output":
            call_id = (item.call_id or "").removeprefix(CALL_PREFIX)
            message = ChatMessage("tool", join_text(item.output, where), tool_call_id=call_id)
        case _:
            unknown.append(f"input[].{item.type}")
            return
    last = messages[-1] if messages else None
    if last is not None and last.role == message.role == "assistant":
        messages[-1] = _join_turns(last, message)
    else:
        messages.append(message)


def _join_turns(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    return replace(
        first,
        content=first.content + second.content,
        tool_calls=[*first.tool_calls, *second.tool_calls],
        reasoning_content=first.reasoning_content + second.reasoning_content,
    )


def _choose_tools(request: ResponsesRequest, unknown: list[str]) -> tuple[list[ToolFunction], bool]:
    """The functions that may be called, and whether one of them must be."""
    functions: list[ToolFunction] = []
    for fields in request.tools or []:
        check_free_form(fields, "tools")
        if function := _read_tool(fields):
            functions.append(function)
        else:
            unknown.append(f"tools[].{fields.get('type')}")
    match request.tool_choice:
        case "none":
            return [], False
        case "required":
            return functions, True
        case ResponsesToolChoice(type="allowed_tools", mode=mode, tools=tools):
            names = [tool.name for tool in tools if tool.name]
            return choose_functions(functions, names, "tool_choice"), mode == "required"
        case ResponsesToolChoice(type="function" | "custom", name=name):
            return choose_functions(functions, [name or ""], "tool_choice"), True
        case ResponsesToolChoice(type=kind):
            raise refuse_value("tool_choice", f"the type {kind!r} is not known here")
        case _:
            return functions, False


def _read_tool(fields: dict[str, Any]) -> ToolFunction | None:
    """A tool that can be called; None for those of OpenAI's servers."""
    try:
        tool = msgspec.convert(fields, ResponsesTool)
    except msgspec.ValidationError as error:
        raise to_field_error(error) from error
    description = tool.description or ""
    if tool.type == "custom" and tool.name:
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
        }
        return ToolFunction(
            name=tool.name, description=description, parameters=parameters, freeform=True
        )
    if tool.type != "function" or not tool.name:
        return None
    return ToolFunction(name=tool.name, description=description, parameters=tool.parameters)


def _read_schema(text: TextConfig | None) -> dict[str, Any] | None:
    wanted = text.format if text else None
    match wanted.type if wanted else "text":
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            if wanted is None or wanted.schema is None:
                raise refuse_value("text.format", "the schema is missing")
            return wanted.schema
        case _:
            return None
