"""Validation and combination of sampling parameters. The arithmetic is in `sampler.py`."""

from functools import cache
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import structs

from protocol.errors import UsageError
from protocol.messages import DraftDistribution, Sampling
from protocol.validation import describe

PresetName = Literal["default", "greedy", "balanced", "creative", "conservative"]


class Preset(NamedTuple):
    """A starting point for the parameters of a request."""

    sampling: dict[str, Any]
    """Fields of `Sampling`."""
    max_draft_tokens: int = 0
    """Limit on the planner's draft tokens per round; 0 is unlimited."""


_PRESETS: dict[PresetName, Preset] = {
    # The model's recommended parameters; otherwise greedy, which is mlx-lm's default too: a
    # reproducible answer, and the best acceptance.
    "default": Preset({}),
    "greedy": Preset({"temperature": 0.0}),
    "balanced": Preset({"temperature": 0.7, "top_p": 0.9}),
    "creative": Preset({"temperature": 1.0, "top_p": 0.95, "min_p": 0.05}),
    # Short drafts: hardly any work is wasted, which costs little speed and saves energy.
    "conservative": Preset({"temperature": 0.3, "top_p": 0.9}, max_draft_tokens=3),
}
PRESETS: tuple[PresetName, ...] = tuple(_PRESETS)

_COLDEST = 1e-4
_EPSILON = 1e-6
"""Distance of filters from values that keep only the best token."""

_NOT_DRAWING = frozenset(
    {"acceptance", "draft_temperature", "draft_top_p", "saguaro", "logits_options", "logprobs"}
)
"""Fields of `Sampling` that do not set how a token is drawn from processed logits."""

_SUM_TOLERANCE = 1e-3
"""A distribution may come from float32 arithmetic; it is normalised again before use."""


def is_greedy(sampling: Sampling) -> bool:
    """Return True if the best token always wins: temperature 0, or low enough to overflow."""
    return sampling.temperature < _COLDEST


def uses_rejection(sampling: Sampling) -> bool:
    """Return True if the rejection rule applies; for greedy sampling both rules are equal."""
    return sampling.acceptance == "rejection" and not is_greedy(sampling)


def goes_beyond(sampling: Sampling, applied: frozenset[str]) -> bool:
    """Return True if a field sets how tokens are drawn, and is not among the `applied` ones."""
    others = _fields_beyond(type(sampling), applied)
    return any(getattr(sampling, name) != default for name, default in others)


@cache
def _fields_beyond(kind: type[Sampling], applied: frozenset[str]) -> list[tuple[str, Any]]:
    """Return name and default of each field that is not among these, nor in `_NOT_DRAWING`."""
    left_out = applied | _NOT_DRAWING
    fields = structs.fields(kind)
    return [(field.name, field.default) for field in fields if field.name not in left_out]


def drafter_sampling(sampling: Sampling) -> Sampling:
    """Return the parameters with which the drafter chooses its tokens."""
    temperature, top_p = sampling.draft_temperature, sampling.draft_top_p
    return structs.replace(
        sampling,
        temperature=sampling.temperature if temperature is None else temperature,
        top_p=sampling.top_p if top_p is None else top_p,
    )


def check_sampling(sampling: Sampling) -> None:
    """Raise UsageError if a parameter, or a combination of parameters, is invalid."""
    _check_ranges(sampling)
    has_own_distribution = (
        sampling.draft_temperature is not None or sampling.draft_top_p is not None
    )
    if is_greedy(sampling) and has_own_distribution:
        raise UsageError(
            "a drafter's own temperature or top-p needs a temperature above 0: "
            "a greedy answer is drafted for greedily"
        )
    if sampling.saguaro == 1.0:
        return
    if sampling.acceptance != "rejection":
        raise UsageError("Saguaro sampling (a C below 1) needs the rejection rule of acceptance")
    if is_greedy(sampling) or is_greedy(drafter_sampling(sampling)):
        raise UsageError(
            "Saguaro sampling (a C below 1) needs a target and a drafter with temperatures above 0"
        )


def _check_ranges(sampling: Sampling) -> None:
    """Check ranges that decoding guarantees, but that Python callers may violate."""
    try:
        msgspec.convert(msgspec.to_builtins(sampling), Sampling)
    except msgspec.ValidationError as error:
        raise UsageError(describe(error).removeprefix("logits_options.")) from error


def fit_filters(fields: dict[str, Any]) -> dict[str, Any]:
    """Replace a top-p of 0 and a min-p of 1 by values that keep only the best token.

    None, for a field that is not set, is kept.
    """
    fitted = dict(fields)
    for name, least, most in (("top_p", _EPSILON, 1.0), ("min_p", 0.0, 1.0 - _EPSILON)):
        if fitted.get(name) in (0, 1):
            fitted[name] = min(max(fitted[name], least), most)
    return fitted


def is_valid_distribution(distribution: DraftDistribution, token: int) -> bool:
    """Return True if the token can have been drawn from this distribution."""
    if not distribution.tokens and not distribution.probabilities:
        return True  # not sampled: proposed deterministically
    return (
        len(distribution.tokens) == len(distribution.probabilities) == len(set(distribution.tokens))
        and all(0.0 <= probability <= 1.0 for probability in distribution.probabilities)
        and abs(sum(distribution.probabilities) - 1.0) < _SUM_TOLERANCE
        and token in distribution.tokens
        and distribution.probabilities[distribution.tokens.index(token)] > 0.0
    )


def get_preset(name: PresetName) -> Preset:
    """Return the values of a preset; all other fields keep their defaults."""
    return _PRESETS[name]
