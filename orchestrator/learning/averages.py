"""Running averages in which old samples fade: the basis of all estimates.

`Ema` is a mean of samples, `DiscountedRatio` a sum of parts over a sum of wholes (accepted over
offered, tokens over milliseconds).
"""

from dataclasses import dataclass

_SMOOTHING = 0.1
"""Weight of a new sample in a mean, after many samples."""
FADE = 0.99
"""Share of their weight that earlier samples of a rate keep after a new one."""
PRIOR = 6.0
"""Number of samples that an assumed rate counts as."""


class Ema:
    """An exponential moving average whose first samples count in full.

    Args:
        assumed: the value before the first sample.
        weight: number of samples that the assumed value counts as; 0: the first sample replaces
            it.
    """

    def __init__(self, assumed: float = 0.0, *, weight: float = 0.0) -> None:
        self.value = assumed
        self.is_known = False
        """True once there was a sample."""
        self._weight = weight

    def observe(self, sample: float) -> None:
        """Add a sample."""
        self.is_known = True
        self._weight = (1.0 - _SMOOTHING) * self._weight + 1.0
        self.value += (sample - self.value) / self._weight


@dataclass
class DiscountedRatio:
    """A sum of parts over a sum of wholes; every new pair discounts the old ones."""

    part: float = 0.0
    whole: float = 0.0

    @property
    def value(self) -> float:
        """The parts per whole; 0 without a whole."""
        return self.part / self.whole if self.whole > 0.0 else 0.0

    def observe(self, part: float, whole: float = 1.0, *, fade: float = 1.0) -> None:
        """Add a pair; earlier ones keep the share `fade` of their weight."""
        self.part = fade * self.part + part
        self.whole = fade * self.whole + whole
