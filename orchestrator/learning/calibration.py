"""Calibration: acceptance rate of draft tokens by the drafter's confidence."""

from orchestrator.learning.averages import DiscountedRatio

_PRIOR = 8.0
"""Number of samples per class that the assumption "confidence is acceptance" counts as."""
_FADE = 0.99
_CLASSES = 10


class Calibration:
    """Maps a drafter's confidence in a token to the acceptance rate of such tokens."""

    def __init__(self) -> None:
        centres = [(index + 0.5) / _CLASSES for index in range(_CLASSES)]
        self._accepted = [DiscountedRatio(_PRIOR * centre, _PRIOR) for centre in centres]

    def rate(self, confidence: float) -> float:
        """Return the probability that such a token is accepted, given that it is reached."""
        return self._accepted[_classify(confidence)].value

    def observe(self, confidence: float, *, accepted: bool) -> None:
        """Add a token whose parent was accepted."""
        self._accepted[_classify(confidence)].observe(float(accepted), fade=_FADE)


def _classify(confidence: float) -> int:
    return min(_CLASSES - 1, max(0, int(confidence * _CLASSES)))
