"""From a request's body to what the orchestrator is asked, or a fault that names the field."""

import re
import secrets
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from protocol.decoding.grammar import json_grammar
from protocol.decoding.sampling_params import check_sampling
from protocol.messages import ChatMessage, Generate, LogitsOptions, Sampling
from services.gateway.errors import ApiError, unsupported
from services.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    ToolCall,
    ToolChoice,
    ToolFunction,
    Turn,
)
from services.gateway.tools import call_grammar

R = TypeVar("R", ChatRequest, CompletionRequest)

_NO_LIMIT = 2**31 - 1
"""Tokens of an answer that may grow until the context is full."""

_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<field>[^`]*)`")


def decode_request(body: bytes, kind: type[R]) -> R:
    """The request in a body; raises Fault naming the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error


def _misfit(sentence: str) -> ApiError:
    found = _PLACE.search(sentence)
    path = found["path"] if found else ""
    unknown = _UNKNOWN.search(sentence)
    if unknown is None:
        return ApiError(400, sentence, code="invalid_value", param=path or None)
    field = f"{path}.{unknown['field']}" if path else unknown["field"]
    message = f"unrecognised field {field!r}: this server neither supports nor ignores it"
    return ApiError(400, message, code="unknown_parameter", param=field)


def parse_chat(request: ChatRequest, defaults: Sampling) -> Generate:
    """What to ask for a conversation; raises Fault for what cannot be honoured."""
    return _generate(
        request,
        defaults,
        grammar=_grammar(request),
        logprobs=_logprobs(request),
        max_tokens=_max_tokens(request),
        tools=[
            {"type": "function", "function": _described(function)}
            for function in list_functions(request)
        ],
        template_options=request.chat_template_kwargs or {},
        messages=[_message(index, turn) for index, turn in enumerate(request.messages)],
    )


def parse_completion(request: CompletionRequest, defaults: Sampling) -> Generate:
    """What to ask for a text to be continued; raises Fault for what cannot be honoured."""
    given = _prompt(request.prompt)
    return _generate(
        request,
        defaults,
        grammar="",
        logprobs=request.logprobs,
        max_tokens=request.max_tokens,
        **given,
    )


def _max_tokens(request: ChatRequest) -> int | None:
    """OpenAI's name of today, or the one before."""
    new, old = request.max_completion_tokens, request.max_tokens
    if new and old and new != old:
        raise unsupported("max_tokens", f"{old}, but max_completion_tokens says {new}")
    return new or old


def _prompt(prompt: str | list[int | str]) -> dict[str, Any]:
    """A text, or the tokens of one."""
    if not prompt:
        raise ApiError(400, "the prompt is empty", code="invalid_value", param="prompt")
    if isinstance(prompt, str):
        return {"text": prompt}
    if len(prompt) == 1 and prompt[0] and isinstance(prompt[0], str):
        return {"text": prompt[0]}
    if any(isinstance(part, str) for part in prompt):
        raise unsupported("prompt", "one prompt per request, please")
    if not all(isinstance(part, int) and 0 <= part < 2**31 for part in prompt):
        raise ApiError(400, "the prompt holds no token ids", code="invalid_value", param="prompt")
    return {"tokens": prompt}


def _generate(
    request: R,
    defaults: Sampling,
    *,
    grammar: str,
    logprobs: int | None,
    max_tokens: int | None,
    **prompt: Any,
) -> Generate:
    plain = request.draft_model is None or request.num_draft_tokens == 0
    sampling = replace(
        _sampling(request, defaults), logits_options=_shape(request, grammar), logprobs=logprobs
    )
    check_sampling(sampling)
    try:
        return Generate(
            request=1,
            sampling=sampling,
            max_tokens=min(max_tokens or _NO_LIMIT, _NO_LIMIT),
            stop=[request.stop] if isinstance(request.stop, str) else list(request.stop or []),
            mode="ar" if plain else "ssd",
            num_draft_tokens=request.num_draft_tokens or 0,
            **prompt,
        )
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from error


def _sampling(request: R, defaults: Sampling) -> Sampling:
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
    }
    seed = secrets.randbits(31) if request.seed is None else request.seed % 2**63
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(defaults, seed=seed, **chosen)


def _shape(request: R, grammar: str) -> LogitsOptions | None:
    """What is done to logits; None leaves them alone, which costs nothing."""
    bias = request.logit_bias or {}
    if not all(token.isdecimal() and int(token) < 2**31 for token in bias):
        raise ApiError(
            400, "logit_bias: keys are token ids", code="invalid_value", param="logit_bias"
        )
    shape = LogitsOptions(
        logit_bias=tuple(sorted((int(token), value) for token, value in bias.items() if value)),
        repetition_penalty=request.repetition_penalty or 1.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        grammar=grammar,
    )
    return shape if shape != LogitsOptions() else None


def _logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs and request.top_logprobs is not None:
        raise unsupported("top_logprobs", "ask for logprobs too")
    return (request.top_logprobs or 0) if request.logprobs else None


def _grammar(request: ChatRequest) -> str:
    """What the answer must look like: a call that is asked for, or the format."""
    called = list_functions(request)
    choice = request.tool_choice
    if isinstance(choice, ToolChoice):
        called = [function for function in called if function.name == choice.function.name]
        if not called:
            raise unsupported("tool_choice", f"there is no tool {choice.function.name!r}")
    if requires_call(request):
        if not called:
            raise unsupported("tool_choice", "there are no tools")
        return call_grammar(called)
    wanted = request.response_format
    match wanted.type if wanted else "text":
        case "json_object":
            return json_grammar({"type": "object"})
        case "json_schema":
            if wanted is None or wanted.json_schema is None:
                raise unsupported("response_format", "json_schema is missing")
            return json_grammar(wanted.json_schema.schema)
        case _:
            return ""


def requires_call(request: ChatRequest | CompletionRequest) -> bool:
    """Whether the answer has to be a call of a tool."""
    choice = None if isinstance(request, CompletionRequest) else request.tool_choice
    return choice == "required" or isinstance(choice, ToolChoice)


def list_functions(request: ChatRequest | CompletionRequest) -> list[ToolFunction]:
    """The tools that may be called."""
    if isinstance(request, CompletionRequest) or request.tool_choice == "none":
        return []
    if request.parallel_tool_calls is False:
        raise unsupported("parallel_tool_calls", "the number of calls cannot be limited")
    return [tool.function for tool in request.tools or []]


def _message(index: int, turn: Turn) -> ChatMessage:
    role = "system" if turn.role == "developer" else turn.role
    content = turn.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and not turn.tool_calls:
        raise ApiError(
            400,
            f"message {index} has no content",
            code="invalid_value",
            param=f"messages[{index}].content",
        )
    return ChatMessage(
        role,
        content or "",
        name=turn.name or "",
        tool_calls=[_called(index, call) for call in turn.tool_calls or []],
        tool_call_id=turn.tool_call_id or "",
    )


def _called(index: int, call: ToolCall) -> dict[str, Any]:
    """An earlier call; templates want its arguments as a map."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except msgspec.DecodeError as error:
        where = f"messages[{index}].tool_calls"
        reason = f"{where}: the arguments are not JSON: {error}"
        raise ApiError(400, reason, code="invalid_value", param=where) from error
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "id": call.id, "function": function}


def _described(function: ToolFunction) -> dict[str, Any]:
    """A tool as chat templates expect it."""
    return {
        "name": function.name,
        "description": function.description or "",
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }
