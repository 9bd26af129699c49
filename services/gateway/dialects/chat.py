"""POST /v1/chat/completions: OpenAI's, with the extensions that local servers share."""

from collections.abc import Iterator
from itertools import filterfalse
from typing import Annotated, Any, Literal

import msgspec

from protocol.messages import ChatMessage, Sampling
from services.gateway.body import check_free_form, decode_body
from services.gateway.dialects.content import (
    Part,
    is_thought,
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
    SamplingFields,
    Stop,
    ToolChoice,
    choose_tools,
    continue_answer,
    describe_call,
    list_stops,
    normalise_effort,
    read_drafting,
    read_sampling,
    read_schema,
    system_first,
)
from services.gateway.errors import invalid, refuse_value
from services.gateway.task import MAX_ANSWERS, PromptInput, Task, Thinking
from services.gateway.tools.calls import ToolFunction


class FunctionFields(Fields, frozen=True, kw_only=True):
    """A function's name, description and parameters."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields, frozen=True, kw_only=True):
    """A tool; only functions are supported here, also in the form of the responses API."""

    type: str = "function"
    function: FunctionFields | None = None
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchema(Fields, frozen=True, kw_only=True):
    """A schema that the answer must follow."""

    name: str = ""
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields, frozen=True, kw_only=True):
    """Format of the answer: text, JSON, or JSON with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    """llama.cpp's place for the schema."""


class StreamOptions(Fields, frozen=True, kw_only=True):
    """Optional contents of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False
    include_origins: bool = False
    """Extension: per chunk, where each token came from and the piece of text it completed."""


class ThinkingFields(Fields, frozen=True, kw_only=True):
    """The field by which some servers turn thinking on and off."""

    type: str = ""
    budget_tokens: int | None = None


class CompletionFields(SamplingFields, frozen=True, kw_only=True):
    """Fields of chat and text completions."""

    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_ANSWERS)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    n_predict: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    """llama.cpp's name for it."""
    logprobs: bool | Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=-1, le=20)] | None = None
    """Number of alternatives if `logprobs` is true; -1 means none, as for mlx-lm."""


class ChatRequest(CompletionFields, frozen=True, kw_only=True):
    """The fields of a request."""

    messages: Annotated[list[Part], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionFields], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    """What tools were called before there were others; one is called at a time."""
    function_call: Literal["none", "auto"] | ToolChoice | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_budget: Count | None = None
    thinking: ThinkingFields | None = None
    continue_final_message: bool | None = None
    """True to continue the last message, an assistant's, instead of answering it."""


def parse_chat(
    body: bytes, defaults: Sampling, *, strict: bool = False
) -> tuple[Task, ChatRequest]:
    """Parse a body into a task; raises ApiError for what cannot be honoured."""
    request, unknown = decode_body(body, ChatRequest, strict=strict)
    functions, must_call = _choose_tools(request, unknown)
    task = Task(
        prompts=[_read_prompt(request, unknown)],
        functions=functions,
        must_call=must_call,
        one_call=request.parallel_tool_calls is False or bool(request.functions),
        schema=_read_schema(request.response_format) or request.json_schema,
        thinking=_read_thinking(request),
        template_options=request.chat_template_kwargs or {},
        **read_completion_fields(request, defaults, unknown),
    )
    return task, request


def read_completion_fields(
    request: CompletionFields, defaults: Sampling, unknown: list[str]
) -> dict[str, Any]:
    """Return the fields of a `Task` that chat and text completions share."""
    if request.stream_options and not request.stream:
        unknown.append("stream_options")
    return {
        "model": request.model,
        "sampling": read_sampling(
            request, defaults, logprobs=_read_logprobs(request.logprobs, request.top_logprobs)
        ),
        "max_tokens": _read_max_tokens(
            max_completion_tokens=request.max_completion_tokens,
            max_tokens=request.max_tokens,
            n_predict=request.n_predict,
        ),
        "stop": list_stops(request.stop),
        "choices": request.n or 1,
        "stream": bool(request.stream),
        "unknown": unknown,
        **read_drafting(request),
    }


def _read_max_tokens(**fields: int | None) -> int | None:
    """The limit of the first of these fields that is given; -1 is no limit."""
    for name, limit in fields.items():
        if limit == 0:
            raise invalid(name, "at least 1 (or -1 for no limit)")
        if limit is not None:
            return None if limit < 0 else limit
    return None


def _read_prompt(request: ChatRequest, unknown: list[str]) -> PromptInput:
    messages = [
        _read_turn(turn, unknown, f"messages[{number}]")
        for number, turn in enumerate(request.messages)
    ]
    refuse_media_alone(
        request.messages[-1].get("content"), f"messages[{len(messages) - 1}].content"
    )
    if request.continue_final_message and messages[-1].role == "assistant":
        if messages[-1].tool_calls:
            raise invalid("messages", "a message that calls a tool cannot be continued")
        if len(messages) == 1:
            raise invalid("messages", "there is nothing before the message to be continued")
        return continue_answer(messages, unknown)
    return PromptInput(messages=system_first(messages, unknown))


_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks", "thinking")
"""Where servers put a message's thought, often in several places at once."""
_READ = {
    *("role", "content", "name", "refusal", "tool_calls", "function_call", "tool_call_id"),
    *_THOUGHTS,
}
"""A message's fields. They may have any type, since the message comes again with every turn."""


def _read_turn(turn: Part, unknown: list[str], where: str) -> ChatMessage:
    check_free_form(turn, where)
    name_unknown(turn, _READ, unknown, "messages[]")
    role, parts = read_role(turn.get("role"), where), list_parts(turn.get("content"))
    thoughts = list(filter(is_thought, parts)) if role == "assistant" else []
    texts = list(filterfalse(is_thought, parts)) if thoughts else parts
    content = join_text(texts, unknown, "messages[].content[]")
    refusal = turn.get("refusal")
    return ChatMessage(
        role,
        "\n".join(filter(None, (content, refusal if isinstance(refusal, str) else ""))),
        name=str(turn.get("name") or ""),
        tool_calls=_read_calls(turn, unknown),
        tool_call_id=str(turn.get("tool_call_id") or ""),
        reasoning_content=_find_thought(turn, unknown) or read_thought(thoughts),
    )


def _find_thought(turn: Part, unknown: list[str]) -> str:
    """Return the first of a message's thoughts; other places have the same, or nothing to read."""
    texts = {name: read_thought(turn[name]) for name in _THOUGHTS if turn.get(name)}
    first = next((name for name, text in texts.items() if text), "")
    unknown += [f"messages[].{name}" for name in texts if name != first]
    return texts.get(first, "")


def _read_calls(turn: Part, unknown: list[str]) -> list[dict[str, Any]]:
    calls, function = turn.get("tool_calls"), turn.get("function_call")
    calls = [*(calls if isinstance(calls, list) else [calls]), function and {"function": function}]
    described: list[dict[str, Any]] = []
    for call in filter(None, calls):
        places = ("function", "custom", str(call.get("type"))) if isinstance(call, dict) else ()
        called = next((call[p] for p in places if isinstance(call.get(p), dict)), call)
        called = called if isinstance(called, dict) else {}
        name, arguments = str(called.get("name") or ""), called.get("arguments")
        if arguments is None and "input" in called:
            arguments = {"input": called["input"] or ""}
        if name or arguments:
            described.append(describe_call(str(call.get("id") or ""), name, arguments))
        else:
            unknown.append("messages[].tool_calls[]")
    return described


def _choose_tools(request: ChatRequest, unknown: list[str]) -> tuple[list[ToolFunction], bool]:
    """The functions that may be called, and whether one of them must be."""
    functions = [
        _read_function(function)
        for function in [*_list_functions(request.tools or [], unknown), *(request.functions or [])]
    ]
    choice: Any = request.tool_choice
    if choice is None and isinstance(request.function_call, ToolChoice):
        choice = ToolChoice(type="function", function=request.function_call)
    return choose_tools(functions, choice or request.function_call, _name_choice)


def _name_choice(choice: ToolChoice) -> str:
    return choice.name or (choice.function and choice.function.name) or ""


def _list_functions(tools: list[Tool], unknown: list[str]) -> Iterator[FunctionFields]:
    for tool in tools:
        if tool.function is not None:
            yield tool.function
        elif tool.type == "function" and tool.name is not None:
            yield FunctionFields(
                name=tool.name, description=tool.description, parameters=tool.parameters
            )
        else:
            unknown.append(f"tools[].{tool.type}"[:64])


def _read_function(fields: FunctionFields) -> ToolFunction:
    return ToolFunction(
        name=fields.name, description=fields.description or "", parameters=fields.parameters
    )


def _read_schema(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    named = wanted.json_schema.schema if wanted.json_schema else None
    schema = wanted.schema if named is None else named
    return read_schema(wanted.type, schema, "response_format")


def _read_thinking(request: ChatRequest) -> Thinking:
    enabled, budget = request.enable_thinking, request.thinking_budget
    if request.thinking is not None:
        enabled = request.thinking.type != "disabled"
        budget = budget or request.thinking.budget_tokens
    return Thinking(
        enabled=enabled, effort=normalise_effort(request.reasoning_effort), budget=budget
    )


def _read_logprobs(wanted: bool | int | None, best: int | None) -> int | None:  # noqa: FBT001
    """How many of the best tokens are reported; None: no log-probabilities at all."""
    if wanted is None or wanted is False:
        if (best or 0) > 0:
            raise refuse_value("top_logprobs", "ask for logprobs too")
        return None
    number = 0 if wanted is True else wanted
    return max(0, number if best is None else best)
