"""What the sampling parameters of a request mean together. No numbers: `law.py` has those."""

import msgspec

from protocol.errors import UsageError
from protocol.messages import DraftDistribution, Sampling

_COLDEST = 1e-4

_SUM_TOLERANCE = 1e-3
"""A law may come from float32 arithmetic; it is normalised again before use."""


def is_greedy(sampling: Sampling) -> bool:
    """Whether the best token always wins: temperature 0, or so low that dividing would overflow."""
    return sampling.temperature < _COLDEST


def uses_rejection(sampling: Sampling) -> bool:
    """Whether the rejection rule decides; greedily both rules are one."""
    return sampling.acceptance == "rejection" and not is_greedy(sampling)


def drafter_sampling(sampling: Sampling) -> Sampling:
    """The parameters by which the drafter chooses its tokens."""
    temperature, top_p = sampling.draft_temperature, sampling.draft_top_p
    return msgspec.structs.replace(
        sampling,
        temperature=sampling.temperature if temperature is None else temperature,
        top_p=sampling.top_p if top_p is None else top_p,
    )


def check_sampling(sampling: Sampling) -> None:
    """Raises UsageError if parameters are combined in a way that has no meaning."""
    own_law = sampling.draft_temperature is not None or sampling.draft_top_p is not None
    if is_greedy(sampling) and own_law:
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


def is_valid_distribution(law: DraftDistribution, token: int) -> bool:
    """Whether this can be the law that the token was drawn from."""
    if not law.tokens and not law.probabilities:
        return True  # not drawn, but named
    return (
        len(law.tokens) == len(law.probabilities) == len(set(law.tokens))
        and abs(sum(law.probabilities) - 1.0) < _SUM_TOLERANCE
        and token in law.tokens
        and law.probabilities[law.tokens.index(token)] > 0.0
    )
