"""Shared by OpenAI's three APIs: fields of requests, tools, and the figures of answers."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from protocol.messages import Acceptance, ChatMessage, Finished, Generate, Sampling
from services.gateway.errors import invalid, refuse_value
from services.gateway.task import EFFORTS, Choice, Effort, PromptInput, make_sampling
from services.gateway.tools.calls import ToolFunction, complete_json

MAX_MESSAGES = 4096
MAX_TOOLS = 512
NAME_PATTERN = r"^[A-Za-z0-9_.:/-]{1,128}$"

Count = Annotated[int, msgspec.Meta(ge=1)]
StopString = Annotated[str, msgspec.Meta(max_length=1024)]
Stop = StopString | Annotated[list[StopString], msgspec.Meta(max_length=16)]
Penalty = Annotated[float, msgspec.Meta(ge=0, le=10)]
"""0 and 1 mean off; otherwise at least 0.1."""
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
FunctionName = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all fields: undeclared fields are dropped (see `body`)."""


class ToolChoice(Fields, frozen=True, kw_only=True):
    """The one tool that must be called, or those that may be: in the places of both APIs."""

    type: str = "function"
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list["ToolChoice"], msgspec.Meta(max_length=MAX_TOOLS)] = []
    function: "ToolChoice | None" = None
    allowed_tools: "ToolChoice | None" = None


class SamplingFields(Fields, frozen=True, kw_only=True):
    """Sampling options; None means not given. The second half are extensions."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    seed: int | None = None
    logit_bias: (
        Annotated[dict[str, Bias], msgspec.Meta(max_length=1024)]
        | Annotated[list[tuple[int | str, Bias | bool]], msgspec.Meta(max_length=1024)]
        | None
    ) = None
    """llama.cpp's form is a list of pairs, in which false bans a token."""

    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Penalty | None = None
    repeat_penalty: Penalty | None = None
    """llama.cpp's name for it."""
    json_schema: dict[str, Any] | None = None
    """llama.cpp's field for the schema of the answer."""
    draft_model: str | msgspec.UnsetType | None = msgspec.UNSET
    """null means plain decoding."""
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """0 means plain decoding."""
    acceptance: Acceptance | None = None
    """coupled: the tokens of plain decoding; rejection: their distribution."""
    draft_temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    draft_top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    saguaro_c: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Rejection only: the draft's weight for prepared tokens."""


def read_sampling(
    fields: SamplingFields, defaults: Sampling, *, logprobs: int | None = None
) -> Sampling:
    """Return the sampling parameters of a request."""
    repetition = fields.repetition_penalty
    return make_sampling(
        defaults,
        seed=fields.seed,
        bias=_read_bias(fields.logit_bias),
        penalties={
            "repetition_penalty": _read_repetition(
                fields.repeat_penalty if repetition is None else repetition
            ),
            "presence_penalty": fields.presence_penalty,
            "frequency_penalty": fields.frequency_penalty,
        },
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=None if fields.top_k is None else max(0, fields.top_k),
        min_p=fields.min_p,
        acceptance=fields.acceptance,
        draft_temperature=fields.draft_temperature,
        draft_top_p=fields.draft_top_p,
        saguaro=fields.saguaro_c,
        logprobs=logprobs,
    )


def _read_bias(bias: dict[str, float] | list[Any] | None) -> dict[str, float] | None:
    if not isinstance(bias, list):
        return bias
    known = ((str(token), value) for token, value in bias if value is not True)
    return {token: _BAN if value is False else value for token, value in known}


def _read_repetition(penalty: float | None) -> float | None:
    if penalty is not None and 0 < penalty < _LEAST_PENALTY:
        raise invalid("repetition_penalty", f"at least {_LEAST_PENALTY:g}, or 0 for none")
    return 1.0 if penalty == 0 else penalty


_MOST_DRAFT_TOKENS = 64
_BAN = -100.0
_LEAST_PENALTY = 0.1


def read_drafting(fields: SamplingFields) -> dict[str, Any]:
    """Return the fields of a `Task` that control drafting."""
    named = fields.draft_model if isinstance(fields.draft_model, str) else None
    return {
        "plain": fields.draft_model is None or fields.num_draft_tokens == 0,
        "drafter": named,
        "num_draft_tokens": min(fields.num_draft_tokens or 0, _MOST_DRAFT_TOKENS),
    }


def list_stops(stop: str | list[str] | None) -> list[str]:
    """Return the stop strings without empty ones."""
    return [string for string in ([stop] if isinstance(stop, str) else stop or []) if string]


def choose_tools(
    functions: list[ToolFunction],
    choice: str | ToolChoice | None,
    name: Callable[[ToolChoice], str],
) -> tuple[list[ToolFunction], bool]:
    """Return the functions that may be called, and whether one of them must be.

    Args:
        functions: all of them.
        choice: the client's; None leaves it to the model.
        name: names the tool of a choice.

    Raises:
        ApiError: there is no such tool, or no such kind of choice.
    """
    match choice:
        case "none" | ToolChoice(type="none"):
            return [], False
        case "required" | "any" | ToolChoice(type="required" | "any"):
            return functions, True
        case str() | None | ToolChoice(type="auto"):
            return functions, False
        case ToolChoice(allowed_tools=ToolChoice() as allowed):
            pass
        case ToolChoice(type="allowed_tools") as allowed:
            pass
        case ToolChoice(type="function" | "custom") | ToolChoice(function=ToolChoice()):
            return choose_functions(functions, [name(choice)], "tool_choice"), True
        case ToolChoice(type=kind):
            raise refuse_value("tool_choice", f"the type {kind!r} is not known here")
    names = [called for tool in allowed.tools if (called := name(tool))]
    return choose_functions(functions, names, "tool_choice"), allowed.mode == "required"


def read_schema(kind: str, schema: dict[str, Any] | None, param: str) -> dict[str, Any] | None:
    """Return the schema of an answer of this kind of format; None allows any text."""
    if kind == "text":
        return None
    if kind == "json_object":
        return schema or {"type": "object"}
    if schema is None:
        raise refuse_value(param, "the schema is missing")
    return schema


def choose_functions(
    functions: list[ToolFunction], names: list[str], param: str
) -> list[ToolFunction]:
    """Return the functions of these names; raises ApiError for an unknown name."""
    known = {function.name: function for function in functions}
    if missing := [name for name in names if name not in known]:
        raise refuse_value(param, f"there is no tool {missing[0]!r}")
    return [known[name] for name in names]


def describe_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call of an earlier turn as templates expect it, with its arguments as an object."""
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            # A truncated call sent back, or invalid JSON.
            completed = msgspec.json.decode(complete_json(arguments))
            arguments = completed or ({} if arguments.strip() == "{" else arguments)
    if not isinstance(arguments, dict):
        arguments = {} if arguments is None else {"input": arguments}
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


def normalise_effort(effort: str | None) -> Effort | None:
    """Return the effort if it is known; clients send others."""
    return next((known for known in EFFORTS if known == effort), None)


def system_first(messages: list[ChatMessage], unknown: list[str]) -> list[ChatMessage]:
    """Merge the leading system messages, since templates often take only one.

    Headers for the client's provider are dropped: they differ between conversations and would
    prevent prefix reuse.
    """
    count = next((n for n, m in enumerate(messages) if m.role != "system"), len(messages))
    given = [message.content for message in messages[:count]]
    texts = [_drop_headers(text, unknown) for text in given]
    if texts == given and count < 2:
        return messages
    joined = "\n\n".join(filter(None, texts))
    return [*([ChatMessage("system", joined)] if joined else []), *messages[count:]]


def continue_answer(messages: list[ChatMessage], unknown: list[str]) -> PromptInput:
    """Return the prompt that the last message, an assistant's, begins the answer to."""
    *before, last = messages
    return PromptInput(
        messages=system_first(before, unknown),
        answer_start=last.content,
        answer_thought=last.reasoning_content,
    )


_HEADER = re.compile(r"(x-[a-z0-9]+(?:-[a-z0-9]+)+):[^\n]*(?:\n|\Z)")


def _drop_headers(system: str, unknown: list[str]) -> str:
    """Return instructions without the header lines at their start."""
    while found := _HEADER.match(system):
        unknown.append(f"system.{found[1]}")
        system = system[found.end() :]
    return system


def count_usage(choices: list[Choice], *, prompts: int = 1) -> dict[str, Any]:
    """Return token counts; the choices of one prompt share it."""
    per_prompt = max(1, len(choices) // prompts)
    firsts = [choice.end for choice in choices[::per_prompt]]
    prompt = sum(end.prompt_tokens for end in firsts)
    completion = sum(choice.transcript.tokens for choice in choices)
    reasoning = sum(choice.transcript.reasoning_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in firsts)},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def report_timings(finished: Finished, tokens: int) -> dict[str, Any]:
    """Return times in ms and speeds in tokens per second, as llama.cpp does."""
    s = finished.statistics
    prompt_ms = s.phase_ms.get("prefill_verifier", 0.0)
    fresh = finished.prompt_tokens - finished.cached_tokens
    return {
        "prompt_n": fresh,
        "cache_n": finished.cached_tokens,
        "prompt_ms": prompt_ms,
        "prompt_per_second": 1e3 * finished.prefilled_tokens / prompt_ms if prompt_ms else 0.0,
        "predicted_n": tokens,
        "predicted_ms": 1e3 * s.decode_s,
        "predicted_per_second": s.tok_s,
        "draft_n": s.drafted,
        "draft_n_accepted": s.accepted,
        "draft_rounds": s.rounds - s.plain_rounds,
        "draft_kind": (s.drafter.partition(" ")[0] or "ngram") if s.drafted else None,
    }


def report_speculation(finished: Finished, request: Generate) -> dict[str, Any]:
    """Return figures of the speculation; for definitions see docs/guide/statistics.md."""
    s = finished.statistics
    return {
        "mode": request.mode,
        "seed": request.sampling.seed,
        "ttft_ms": s.ttft_ms,
        "rounds": s.rounds,
        "acceptance_rate": s.acceptance_rate,
        "mean_acceptance_length": s.mean_acceptance_length,
        "cache_hits": s.cache_hits,
        "cache_misses": s.cache_misses,
        "overlap_ratio": s.overlap_ratio,
        "draft_wait_ms": s.phase_ms.get("draft_wait", 0.0),
        "verify_ms": s.phase_ms.get("verify", 0.0),
        "fallbacks": s.fallbacks,
        "plain_tok_s": s.plain_tok_s,
        "plain_age_s": s.plain_age_s,
    }
