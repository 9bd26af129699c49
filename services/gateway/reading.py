"""From a request's body to what the orchestrator is asked, or a fault that names the field."""

import re
import secrets
from typing import Any, TypeVar

import msgspec

from protocol.messages import ChatMessage, Generate, Sampling
from protocol.sampling import check
from services.gateway.faults import Fault, unsupported
from services.gateway.fields import ChatRequest, CompletionRequest, Turn

R = TypeVar("R", ChatRequest, CompletionRequest)

_NO_LIMIT = 2**31 - 1
"""Tokens of an answer that may grow until the context is full."""

_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<field>[^`]*)`")


def read(body: bytes, kind: type[R]) -> R:
    """The request in a body; raises Fault naming the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Fault(400, f"the body is not JSON: {error}", code="invalid_json") from error


def _misfit(sentence: str) -> Fault:
    found = _PLACE.search(sentence)
    path = found["path"] if found else ""
    unknown = _UNKNOWN.search(sentence)
    if unknown is None:
        return Fault(400, sentence, code="invalid_value", param=path or None)
    field = f"{path}.{unknown['field']}" if path else unknown["field"]
    message = f"unrecognised field {field!r}: this server neither supports nor ignores it"
    return Fault(400, message, code="unknown_parameter", param=field)


def chat(request: ChatRequest, defaults: Sampling) -> Generate:
    """What to ask for a conversation; raises Fault for what cannot be honoured."""
    _refuse_chat(request)
    return _generate(
        request,
        defaults,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        messages=[_message(index, turn) for index, turn in enumerate(request.messages)],
    )


def completion(request: CompletionRequest, defaults: Sampling) -> Generate:
    """What to ask for a text to be continued; raises Fault for what cannot be honoured."""
    if request.logprobs is not None:
        raise unsupported("logprobs", "not supported yet")
    given = _prompt(request.prompt)
    return _generate(request, defaults, max_tokens=request.max_tokens, **given)


def _prompt(prompt: str | list[int | str]) -> dict[str, Any]:
    """A text, or the tokens of one."""
    if not prompt:
        raise Fault(400, "the prompt is empty", code="invalid_value", param="prompt")
    if isinstance(prompt, str):
        return {"text": prompt}
    if len(prompt) == 1 and prompt[0] and isinstance(prompt[0], str):
        return {"text": prompt[0]}
    if any(isinstance(part, str) for part in prompt):
        raise unsupported("prompt", "one prompt per request, please")
    if not all(isinstance(part, int) and 0 <= part < 2**31 for part in prompt):
        raise Fault(400, "the prompt holds no token ids", code="invalid_value", param="prompt")
    return {"tokens": prompt}


def _generate(request: R, defaults: Sampling, *, max_tokens: int | None, **prompt: Any) -> Generate:
    if request.n not in (None, 1):
        raise unsupported("n", "one answer per request, please")
    _refuse_unfinished(request)
    plain = request.draft_model is None or request.num_draft_tokens == 0
    sampling = _sampling(request, defaults)
    check(sampling)
    try:
        return Generate(
            request=1,
            sampling=sampling,
            max_tokens=min(max_tokens or _NO_LIMIT, _NO_LIMIT),
            stop=[request.stop] if isinstance(request.stop, str) else list(request.stop or []),
            mode="ar" if plain else "ssd",
            lookahead=request.num_draft_tokens or 0,
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
    return msgspec.structs.replace(defaults, seed=seed, **chosen)


def _refuse_unfinished(request: R) -> None:
    for name in ("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if getattr(request, name):
            raise unsupported(name, "not supported yet")


def _refuse_chat(request: ChatRequest) -> None:
    if request.response_format is not None and request.response_format.type != "text":
        raise unsupported("response_format", "only text is supported yet")
    for name in ("logprobs", "top_logprobs", "tools", "chat_template_kwargs"):
        if getattr(request, name):
            raise unsupported(name, "not supported yet")


def _message(index: int, turn: Turn) -> ChatMessage:
    role = "system" if turn.role == "developer" else turn.role
    content = turn.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None:
        raise Fault(
            400,
            f"message {index} has no content",
            code="invalid_value",
            param=f"messages[{index}].content",
        )
    return ChatMessage(role, content)
