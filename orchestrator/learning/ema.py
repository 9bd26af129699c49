"""A running mean."""

from orchestrator.learning.snapshot import Average

_SMOOTHING = 0.1
"""Weight of a new sample, once there were many."""

_RECALLED = 3.0
"""Most samples that a remembered mean counts for."""


class Ema:
    """Its first samples count in full, later ones fade."""

    def __init__(self, assumed: float = 0.0) -> None:
        self.value = assumed
        """The assumed value, until there is a sample."""
        self._weight = 0.0

    def observe(self, sample: float) -> None:
        """One sample; the first ones count in full."""
        self._weight = (1.0 - _SMOOTHING) * self._weight + 1.0
        self.value += (sample - self.value) / self._weight

    def memory(self) -> Average:
        """For another run."""
        return Average(value=self.value, weight=self._weight)

    def recall(self, remembered: Average) -> None:
        """Begin with what was known."""
        if remembered.weight > 0.0:
            self.value = remembered.value
            self._weight = min(remembered.weight, _RECALLED)
