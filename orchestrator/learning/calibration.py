"""Calibration: acceptance rate of draft tokens by the drafter's confidence."""

from orchestrator.learning.averages import FADE, PRIOR, DiscountedRatio

_CLASSES = 10


class Calibration:
    """Maps a drafter's confidence in a token to the acceptance rate of such tokens."""

    def __init__(self) -> None:
        centres = [(index + 0.5) / _CLASSES for index in range(_CLASSES)]
        # Until it is measured, confidence is acceptance.
        self._accepted = [DiscountedRatio(PRIOR * centre, PRIOR) for centre in centres]

    def rate(self, confidence: float) -> float:
        """Return the probability that such a token is accepted, given that it is reached."""
        return self._accepted[_classify(confidence)].value

    def observe(self, confidence: float, *, accepted: bool) -> None:
        """Add a token whose parent was accepted."""
        self._accepted[_classify(confidence)].observe(float(accepted), fade=FADE)


def _classify(confidence: float) -> int:
    return min(_CLASSES - 1, max(0, int(confidence * _CLASSES)))
