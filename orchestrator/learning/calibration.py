"""At what rate draft tokens are accepted, by the drafter's confidence in them."""

from collections.abc import Sequence

from orchestrator.learning.averages import DiscountedRatio, restore_shares, save_shares
from orchestrator.learning.snapshot import Shares

_BINS = 10
_PRIOR = 8.0
"""Samples that the assumption "confidence is acceptance" counts for, per bin."""
_FADE = 0.99
_RECALLED = 24.0


class Calibration:
    """Turns a drafter's confidence in a token into the rate at which such tokens are accepted."""

    def __init__(self) -> None:
        centres = [(index + 0.5) / _BINS for index in range(_BINS)]
        self._accepted = [DiscountedRatio(_PRIOR * centre, _PRIOR) for centre in centres]

    def rate(self, confidence: float) -> float:
        """Probability that a token of this confidence is accepted, given that it is reached."""
        return self._accepted[_bin(confidence)].value

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """Of a chain's draft tokens the first `accepted` stood; the next one fell."""
        for index, confidence in enumerate(confidences[: accepted + 1]):
            self._accepted[_bin(confidence)].observe(float(index < accepted), fade=_FADE)

    def save(self) -> Shares:
        """For a snapshot."""
        return save_shares(self._accepted)

    def restore(self, saved: Shares) -> None:
        """Start from a snapshot."""
        self._accepted = restore_shares(saved, _BINS, _RECALLED) or self._accepted


def _bin(confidence: float) -> int:
    return min(_BINS - 1, max(0, int(confidence * _BINS)))
