"""What OpenAI's three APIs share: fields of requests, tools, and the figures of answers."""

import re
from typing import Annotated, Any

import msgspec

from protocol.messages import Acceptance, ChatMessage, Finished, Generate, Sampling, Status
from services.gateway.errors import invalid, refuse_value
from services.gateway.task import EFFORTS, Choice, Effort, make_sampling
from services.gateway.tools.calls import ToolFunction, complete_json

MAX_MESSAGES = 4096
MAX_TOOLS = 512
NAME_PATTERN = r"^[A-Za-z0-9_.:/-]{1,128}$"

Count = Annotated[int, msgspec.Meta(ge=1)]
StopString = Annotated[str, msgspec.Meta(max_length=1024)]
Stop = StopString | Annotated[list[StopString], msgspec.Meta(max_length=16)]
Penalty = Annotated[float, msgspec.Meta(ge=0, le=10)]
"""0 and 1 are off; else at least 0.1."""
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
FunctionName = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all: fields that are not named here are left out (see `body`)."""


class SamplingFields(Fields, frozen=True, kw_only=True):
    """How to draw tokens; None is the same as not given. The second half are extensions."""

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
    """llama.cpp's are pairs, of which false bans a token."""

    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Penalty | None = None
    repeat_penalty: Penalty | None = None
    """llama.cpp's name of it."""
    json_schema: dict[str, Any] | None = None
    """llama.cpp's: what the answer must follow."""
    draft_model: str | msgspec.UnsetType | None = msgspec.UNSET
    """null: plain decoding."""
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """0: plain decoding."""
    acceptance: Acceptance | None = None
    """coupled: the tokens of plain decoding; rejection: their distribution."""
    draft_temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    draft_top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    saguaro_c: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Rejection: the draft's weight for tokens that are prepared for."""


def read_sampling(
    fields: SamplingFields, defaults: Sampling, *, logprobs: int | None = None
) -> Sampling:
    """The sampling parameters of a request."""
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
    """The fields of a `Task` that say how to draft."""
    named = fields.draft_model if isinstance(fields.draft_model, str) else None
    return {
        "plain": fields.draft_model is None or fields.num_draft_tokens == 0,
        "drafter": named,
        "num_draft_tokens": min(fields.num_draft_tokens or 0, _MOST_DRAFT_TOKENS),
    }


def list_stops(stop: str | list[str] | None) -> list[str]:
    """The stop strings; empty ones stop nothing."""
    return [string for string in ([stop] if isinstance(stop, str) else stop or []) if string]


def choose_functions(
    functions: list[ToolFunction], names: list[str], param: str
) -> list[ToolFunction]:
    """Those of these names; raises ApiError for a name that is none of them."""
    known = {function.name: function for function in functions}
    if missing := [name for name in names if name not in known]:
        raise refuse_value(param, f"there is no tool {missing[0]!r}")
    return [known[name] for name in names]


def describe_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call of an earlier turn, as templates want it: its arguments are an object."""
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            # A call that was cut off, sent back; or no JSON at all.
            completed = msgspec.json.decode(complete_json(arguments))
            arguments = completed or ({} if arguments.strip() == "{" else arguments)
    arguments = arguments if isinstance(arguments, dict) else {"input": arguments}
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


def normalise_effort(effort: str | None) -> Effort | None:
    """The effort, if it is one that is known; clients invent others."""
    return next((known for known in EFFORTS if known == effort), None)


def system_first(messages: list[ChatMessage], unknown: list[str]) -> list[ChatMessage]:
    """With all of the leading system messages as one: templates often take only one.

    Headers for the client's provider are left out: they differ from conversation to
    conversation, so none could go on from the prefix of another.
    """
    count = next((n for n, m in enumerate(messages) if m.role != "system"), len(messages))
    given = [message.content for message in messages[:count]]
    texts = [_drop_headers(text, unknown) for text in given]
    if texts == given and count < 2:
        return messages
    joined = "\n\n".join(filter(None, texts))
    return [*([ChatMessage("system", joined)] if joined else []), *messages[count:]]


_HEADER = re.compile(r"(x-[a-z0-9]+(?:-[a-z0-9]+)+):[^\n]*(?:\n|\Z)")


def _drop_headers(system: str, unknown: list[str]) -> str:
    """Instructions without the header lines that they begin with."""
    while found := _HEADER.match(system):
        unknown.append(f"system.{found[1]}")
        system = system[found.end() :]
    return system


def count_usage(choices: list[Choice], *, prompts: int = 1) -> dict[str, Any]:
    """Token counts; the choices of one prompt share it."""
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


def report_timings(finished: Finished, tokens: int, status: Status) -> dict[str, Any]:
    """Times in ms, speeds in tokens per second, as llama.cpp has them."""
    s = finished.statistics
    prompt_ms = s.phase_ms.get("prefill_verifier", 0.0)
    fresh = finished.prompt_tokens - finished.cached_tokens
    return {
        "prompt_n": fresh,
        "cache_n": finished.cached_tokens,
        "prompt_ms": prompt_ms,
        "prompt_per_second": 1e3 * fresh / prompt_ms if prompt_ms else 0.0,
        "predicted_n": tokens,
        "predicted_ms": 1e3 * s.decode_s,
        "predicted_per_second": s.tok_s,
        "draft_n": s.drafted,
        "draft_n_accepted": s.accepted,
        "draft_rounds": s.rounds - s.plain_rounds,
        "draft_kind": status.draft_backend if s.drafted else None,
    }


def report_speculation(finished: Finished, request: Generate) -> dict[str, Any]:
    """How speculation went; definitions: docs/guide/statistics.md."""
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
        "predicted_tok_s": s.predicted_tok_s,
        "plain_tok_s": s.plain_tok_s,
        "plain_age_s": s.plain_age_s,
    }
