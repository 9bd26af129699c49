"""POST /v1/messages: Anthropic's API, from a body to a task."""

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from protocol.messages import ChatMessage, Sampling
from services.gateway.body import check_free_form, decode_body, to_field_error
from services.gateway.dialects.content import (
    Part,
    join_text,
    list_parts,
    name_unknown,
    read_role,
    read_thought,
    refuse_media_alone,
)
from services.gateway.dialects.openai import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Count,
    Fields,
    FunctionName,
    StopString,
    choose_functions,
    continue_answer,
    describe_call,
    normalise_effort,
    system_first,
)
from services.gateway.task import PromptInput, Task, Thinking, make_sampling
from services.gateway.tools.calls import ToolFunction

CALL_PREFIX = "toolu_"
"""Prefix of call ids, as in Anthropic's API."""


class MessageTurn(Fields, frozen=True, kw_only=True):
    """One message."""

    role: Any = None
    content: Any = None


class MessageTool(Fields, frozen=True, kw_only=True):
    """A tool; those of Anthropic's servers have a type and no schema, and some no name."""

    name: FunctionName = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class MessageToolChoice(Fields, frozen=True, kw_only=True):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Fields, frozen=True, kw_only=True):
    """Thinking on or off, and its budget."""

    type: str
    budget_tokens: Count | None = None


class OutputFormat(Fields, frozen=True, kw_only=True):
    """Format of the answer."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Fields, frozen=True, kw_only=True):
    """Effort and format of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Fields, frozen=True, kw_only=True):
    """The fields of a request to count tokens."""

    messages: Annotated[list[MessageTurn], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: Any = None
    tools: Annotated[list[MessageTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Its place in earlier versions of the API."""


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The fields of a request for an answer."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], msgspec.Meta(max_length=16)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None


def parse_messages(body: bytes, defaults: Sampling, *, strict: bool = False) -> Task:
    """Parse a body into a task; raises ApiError for what cannot be honoured."""
    request, unknown = decode_body(body, MessagesRequest, strict=strict)
    sampling = make_sampling(
        defaults,
        seed=None,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )
    return replace(
        _read_task(request, sampling, unknown),
        max_tokens=request.max_tokens,
        stop=[string for string in request.stop_sequences or [] if string],
        stream=bool(request.stream),
    )


def parse_count(body: bytes, *, strict: bool = False) -> Task:
    """Return the task whose prompt is to be counted; errors as for `parse_messages`."""
    request, unknown = decode_body(body, CountRequest, strict=strict)
    return _read_task(request, Sampling(), unknown)


def _read_task(request: CountRequest, sampling: Sampling, unknown: list[str]) -> Task:
    functions, must_call = _choose_tools(request, unknown)
    choice, config = request.tool_choice, request.output_config or OutputConfig()
    form = config.format or request.output_format
    return Task(
        prompts=[_read_prompt(request, unknown)],
        model=request.model,
        sampling=sampling,
        functions=functions,
        must_call=must_call,
        one_call=bool(choice and choice.disable_parallel_tool_use),
        schema=form.schema if form else None,
        thinking=_read_thinking(request.thinking, config.effort),
        unknown=unknown,
    )


def _read_prompt(request: CountRequest, unknown: list[str]) -> PromptInput:
    messages: list[ChatMessage] = []
    if system := join_text(request.system, unknown, "system[]", "\n"):
        messages.append(ChatMessage("system", system))
    for turn in request.messages:
        messages += _read_turn(turn, unknown)
    refuse_media_alone(request.messages[-1].content, "messages")
    last = messages[-1]
    # An answer started by the client is continued.
    if last.role == "assistant" and not last.tool_calls and len(messages) > 1:
        return continue_answer(messages, unknown)
    return PromptInput(messages=system_first(messages, unknown))


def _read_turn(turn: MessageTurn, unknown: list[str]) -> list[ChatMessage]:
    """Convert a message; tool results become separate messages before the user's.

    Calls of tools on servers have their results inside the assistant's message, which continues
    after them; for a template these are several messages.
    """
    role = read_role(turn.role, "messages[]")
    check_free_form(turn.content, "messages")
    if isinstance(turn.content, str):
        return [ChatMessage(role, turn.content)]
    messages: list[ChatMessage] = []
    open_turn: list[Part] = []
    for block in list_parts(turn.content):
        if not str(block.get("type")).endswith("tool_result"):
            open_turn.append(block)
            continue
        if role == "assistant" and open_turn:
            messages.append(_read_blocks(role, open_turn, unknown))
            open_turn = []
        messages.append(_read_result(block, unknown))
    if open_turn or not messages:
        message = _read_blocks(role, open_turn, unknown)
        if message.content or message.tool_calls or message.reasoning_content or not messages:
            messages.append(message)
    return messages


def _read_blocks(role: str, blocks: list[Part], unknown: list[str]) -> ChatMessage:
    """Return the message of one role made of these blocks."""
    texts = [block for block in blocks if not _is_apart(block)]
    for block in blocks:
        if known := _KNOWN.get(str(block.get("type"))):
            name_unknown(block, known, unknown, _WHERE)
    thought = [read_thought(b) for b in blocks if b.get("type") == "thinking"]
    return ChatMessage(
        role,
        join_text(texts, unknown, _WHERE, "\n"),
        tool_calls=[
            describe_call(_call_id(block.get("id")), _full_name(block), block.get("input") or {})
            for block in blocks
            if str(block.get("type")).endswith("tool_use")
        ],
        reasoning_content="".join(thought),
    )


def _read_result(block: Part, unknown: list[str]) -> ChatMessage:
    """Return the result of a call, whether the client or a server ran the tool."""
    content = block.get("content")
    if block.get("type") == "tool_result":
        name_unknown(block, _KNOWN["tool_result"], unknown, _WHERE)
    text = join_text(content, unknown, _WHERE, "\n")
    failed = "Error: " if block.get("is_error") is True else ""
    return ChatMessage("tool", failed + text, tool_call_id=_call_id(block.get("tool_use_id")))


def _call_id(found: Any) -> str:
    return str(found or "").removeprefix(CALL_PREFIX)


def _full_name(block: Part) -> str:
    """Return the tool that a block calls, with the server's name for an MCP tool."""
    names = (block.get("server_name"), block.get("name"))
    return "__".join(str(name) for name in names if name)


def _is_apart(block: Part) -> bool:
    kind = str(block.get("type"))
    return kind.endswith("tool_use") or kind in ("thinking", *_TOOL_CHANGES)


_WHERE = "messages[].content[]"
_TOOL_CHANGES = ("tool_addition", "tool_removal")
_KNOWN = {
    "thinking": {"type", "thinking", "signature"},
    "tool_use": {"type", "id", "name", "input", "caller"},
    "tool_result": {"type", "tool_use_id", "content", "is_error"},
}
"""Fields of blocks that are read, or that have no meaning for a model."""


def _choose_tools(request: CountRequest, unknown: list[str]) -> tuple[list[ToolFunction], bool]:
    """Return the functions that may be called, and whether one of them must be."""
    functions: list[ToolFunction] = []
    for tool in _list_tools(request, unknown):
        if tool.input_schema is None:
            unknown.append(f"tools[].{tool.type or tool.name}")
            continue
        functions.append(
            ToolFunction(
                name=tool.name,
                description=tool.description or "",
                parameters=tool.input_schema,
            )
        )
    match request.tool_choice:
        case MessageToolChoice(type="none"):
            return [], False
        case MessageToolChoice(type="any"):
            return functions, True
        case MessageToolChoice(type="tool", name=name):
            return choose_functions(functions, [name or ""], "tool_choice"), True
        case _:
            return functions, False


def _list_tools(request: CountRequest, unknown: list[str]) -> list[MessageTool]:
    """Return the tools, including additions and removals during the conversation."""
    tools = {tool.name: tool for tool in request.tools or []}
    blocks = (block for turn in request.messages for block in list_parts(turn.content))
    for block in blocks:
        change = block.get("tool")
        if block.get("type") not in _TOOL_CHANGES or not isinstance(change, dict):
            continue
        if block["type"] == "tool_removal":
            if tools.pop(_full_name(change), None) is None:
                unknown.append(f"{_WHERE}.tool_removal")
        elif isinstance(change.get("definition"), dict):
            try:
                tool = msgspec.convert(change["definition"], MessageTool)
            except msgspec.ValidationError as error:
                raise to_field_error(error) from error
            tools[tool.name] = tool
        elif _full_name(change) not in tools:
            unknown.append(f"{_WHERE}.tool_addition")
    return list(tools.values())


def _read_thinking(config: ThinkingConfig | None, effort: str | None) -> Thinking:
    """Return the thinking options; models of this API think only on request."""
    known = normalise_effort(effort)
    if config is None:
        return Thinking(enabled=False, effort=known)
    enabled = {"enabled": True, "disabled": False}.get(config.type)
    return Thinking(enabled=enabled, effort=known, budget=config.budget_tokens)
