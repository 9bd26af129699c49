"""At what rate draft tokens are accepted, by the drafter's confidence in them.

The first choice behind a token and the runners-up beside it (its siblings) are counted apart:
they err differently, and the runners-up's small confidences need finer classes.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from orchestrator.learning.averages import DiscountedRatio

_PRIOR = 8.0
"""Samples that the assumption "confidence is acceptance" counts for, per class."""
_FADE = 0.99

_BINS = 10
_CENTRES = [(index + 0.5) / _BINS for index in range(_BINS)]
_SIBLING_EDGES = (0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4)
_SIBLING_CENTRES = (0.005, 0.015, 0.03, 0.055, 0.085, 0.125, 0.175, 0.25, 0.35, 0.45)


def _bin(confidence: float) -> int:
    return min(_BINS - 1, max(0, int(confidence * _BINS)))


def _sibling_bin(confidence: float) -> int:
    return bisect_right(_SIBLING_EDGES, confidence)


class Calibration:
    """Turns a drafter's confidence in a token into the rate at which such tokens are accepted."""

    def __init__(
        self, centres: Sequence[float] = _CENTRES, classify: Callable[[float], int] = _bin
    ) -> None:
        self._classify = classify
        self._accepted = [DiscountedRatio(_PRIOR * centre, _PRIOR) for centre in centres]

    def rate(self, confidence: float) -> float:
        """Probability that a token of this confidence is accepted, given that it is reached."""
        return self._accepted[self._classify(confidence)].value

    def observe(self, confidence: float, *, accepted: bool) -> None:
        """A token whose parent stood was the target's choice, or not."""
        self._accepted[self._classify(confidence)].observe(float(accepted), fade=_FADE)


def calibrate_siblings() -> Calibration:
    """For a drafter's second, third, ... choices; whether they were verified does not matter."""
    return Calibration(_SIBLING_CENTRES, _sibling_bin)


def acceptance_rates(
    confidences: Sequence[float], parents: Sequence[int], first: Calibration, siblings: Calibration
) -> list[float]:
    """Per draft token, the probability that it is accepted, given that its parent is.

    Siblings share a probability of one, and none is likelier than the one before it.

    Args:
        confidences: the drafter's.
        parents: the row of each token's parent; row 0 is the pending token.
        first: of the first token behind each row.
        siblings: of the others.
    """
    rates: list[float] = []
    left: dict[int, float] = {}
    least: dict[int, float] = {}
    for confidence, parent in zip(confidences, parents, strict=True):
        if parent in left:
            rate = min(siblings.rate(confidence), left[parent], least[parent])
        else:
            rate = first.rate(confidence)
        left[parent], least[parent] = left.get(parent, 1.0) - rate, rate
        rates.append(rate)
    return rates
