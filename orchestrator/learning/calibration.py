"""What a drafter's confidence is worth, learned."""

from collections.abc import Sequence

from orchestrator.learning.snapshot import Shares

_BINS = 10
_PRIOR = 8.0
"""Samples that the assumption "confidence is acceptance" counts for, per bin."""

_FADE = 0.99
"""Old samples fade, so that the rate follows the text."""

_RECALLED = 24.0
"""Most samples that a remembered bin counts for."""


class Calibration:
    """Turns a drafter's confidence in a token into the rate at which such tokens are accepted."""

    def __init__(self) -> None:
        centres = [(index + 0.5) / _BINS for index in range(_BINS)]
        self._accepted = [_PRIOR * centre for centre in centres]
        self._offered = [_PRIOR] * _BINS

    def rate(self, confidence: float) -> float:
        """Probability that a token of this confidence is accepted, given that it is reached."""
        index = _bin(confidence)
        return self._accepted[index] / self._offered[index]

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """Of a chain's draft tokens the first `accepted` stood; the next one fell."""
        for index, confidence in enumerate(confidences[: accepted + 1]):
            place = _bin(confidence)
            self._accepted[place] = _FADE * self._accepted[place] + float(index < accepted)
            self._offered[place] = _FADE * self._offered[place] + 1.0

    def memory(self) -> Shares:
        """For another run."""
        return Shares(found=list(self._accepted), tried=list(self._offered))

    def recall(self, remembered: Shares) -> None:
        """Begin with what was known."""
        if remembered.fits(_BINS):
            self._accepted, self._offered = remembered.weighing(_RECALLED)


def _bin(confidence: float) -> int:
    return min(_BINS - 1, max(0, int(confidence * _BINS)))
