"""POST /v1/messages: Anthropic's API, from a body to a task."""

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from protocol.messages import ChatMessage, Sampling
from services.gateway.body import decode_body
from services.gateway.dialects.openai import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Count,
    Fields,
    FunctionName,
    StopString,
    choose_functions,
    describe_call,
    normalise_effort,
    system_first,
)
from services.gateway.errors import invalid
from services.gateway.task import PromptInput, Task, Thinking, make_sampling
from services.gateway.tools.calls import ToolFunction

CALL_PREFIX = "toolu_"
"""What ids of calls begin with, as Anthropic's do."""


class Block(Fields, frozen=True, kw_only=True):
    """A piece of a message's content; which fields there are depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None


class MessageTurn(Fields, frozen=True, kw_only=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(Fields, frozen=True, kw_only=True):
    """A tool; those of Anthropic's servers have a type and no schema."""

    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class MessageToolChoice(Fields, frozen=True, kw_only=True):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Fields, frozen=True, kw_only=True):
    """Whether the model thinks first, and how much."""

    type: str
    budget_tokens: Count | None = None


class OutputFormat(Fields, frozen=True, kw_only=True):
    """What the answer must be."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Fields, frozen=True, kw_only=True):
    """How much effort to make, and what the answer must be."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Fields, frozen=True, kw_only=True):
    """The fields of a request to count tokens."""

    messages: Annotated[list[MessageTurn], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: Annotated[list[MessageTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The fields of a request for an answer."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], msgspec.Meta(max_length=16)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None


def parse_messages(body: bytes, defaults: Sampling, *, strict: bool = False) -> Task:
    """The task in a body; raises ApiError for what cannot be honoured."""
    request, unknown = decode_body(body, MessagesRequest, strict=strict)
    sampling = make_sampling(
        defaults,
        seed=None,
        temperature=request.temperature,
        top_p=request.top_p or None,
        top_k=request.top_k,
    )
    return replace(
        _read_task(request, sampling, unknown),
        max_tokens=request.max_tokens,
        stop=[string for string in request.stop_sequences or [] if string],
        stream=bool(request.stream),
    )


def parse_count(body: bytes, *, strict: bool = False) -> Task:
    """The task whose prompt is to be counted; errors as for `parse_messages`."""
    request, unknown = decode_body(body, CountRequest, strict=strict)
    return _read_task(request, Sampling(), unknown)


def _read_task(request: CountRequest, sampling: Sampling, unknown: list[str]) -> Task:
    functions, must_call = _choose_tools(request, unknown)
    choice, config = request.tool_choice, request.output_config or OutputConfig()
    schema = config.format.schema if config.format else None
    return Task(
        prompts=[_read_prompt(request)],
        model=request.model,
        sampling=sampling,
        functions=functions,
        must_call=must_call,
        one_call=bool(choice and choice.disable_parallel_tool_use),
        schema=schema,
        thinking=_read_thinking(request.thinking, config.effort),
        unknown=unknown,
    )


def _read_prompt(request: CountRequest) -> PromptInput:
    messages: list[ChatMessage] = []
    if system := _join_text(request.system or "", "system"):
        messages.append(ChatMessage("system", system))
    for index, turn in enumerate(request.messages):
        messages += _read_turn(turn, f"messages[{index}].content")
    answer_start = ""
    last = messages[-1]
    # An answer that the client has begun is continued.
    if last.role == "assistant" and not last.tool_calls and len(messages) > 1:
        answer_start = messages.pop().content
    return PromptInput(messages=system_first(messages), answer_start=answer_start)


def _read_turn(turn: MessageTurn, where: str) -> list[ChatMessage]:
    """A message; results of tools are messages of their own and come first."""
    content = turn.content
    blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
    results = [
        ChatMessage(
            "tool",
            _join_text(block.content or "", where),
            tool_call_id=(block.tool_use_id or "").removeprefix(CALL_PREFIX),
        )
        for block in blocks
        if block.type == "tool_result"
    ]
    calls = [
        describe_call((block.id or "").removeprefix(CALL_PREFIX), block.name or "", block.input)
        for block in blocks
        if block.type == "tool_use"
    ]
    text = _join_text([block for block in blocks if block.type not in _APART], where)
    thought = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    if results and not text:
        return results
    message = ChatMessage(turn.role, text, tool_calls=calls, reasoning_content=thought)
    return [*results, message]


_APART = {"tool_use", "tool_result", "thinking", "redacted_thinking"}


def _join_text(content: str | list[Block], where: str) -> str:
    """The text of a content; raises ApiError if there is anything else in it."""
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            what = {"image": "images", "document": "documents"}.get(
                block.type, f"blocks of type {block.type!r}"
            )
            raise invalid(where, f"{what} are not supported: this model reads text only")
    return "\n".join(block.text or "" for block in content)


def _choose_tools(request: CountRequest, unknown: list[str]) -> tuple[list[ToolFunction], bool]:
    """The functions that may be called, and whether one of them must be."""
    functions: list[ToolFunction] = []
    for tool in request.tools or []:
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


def _read_thinking(config: ThinkingConfig | None, effort: str | None) -> Thinking:
    """Models of this API do not think unless they are asked to."""
    known = normalise_effort(effort)
    if config is None:
        return Thinking(enabled=False, effort=known)
    enabled = {"enabled": True, "disabled": False}.get(config.type)
    return Thinking(enabled=enabled, effort=known, budget=config.budget_tokens)
