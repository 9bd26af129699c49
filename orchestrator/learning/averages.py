"""Running averages in which old samples fade: the one mechanism behind all that is measured.

`Ema` is a mean of samples, `DiscountedRatio` a sum of parts over a sum of wholes (accepted
over offered, tokens over milliseconds).
"""

from dataclasses import dataclass

_SMOOTHING = 0.1
"""Weight of a new sample in a mean, once there were many."""


class Ema:
    """An exponential moving average whose first samples count in full.

    Args:
        assumed: the value until there is a sample.
        weight: samples that the assumed value counts for; 0: it gives way to the first one.
    """

    def __init__(self, assumed: float = 0.0, *, weight: float = 0.0) -> None:
        self.value = assumed
        self.is_known = False
        """Whether there was a sample."""
        self._weight = weight

    def observe(self, sample: float) -> None:
        """Take in one sample."""
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
        """The parts per whole; 0 of nothing."""
        return self.part / self.whole if self.whole > 0.0 else 0.0

    def observe(self, part: float, whole: float = 1.0, *, fade: float = 1.0) -> None:
        """Take in one pair; earlier ones keep the share `fade` of their weight."""
        self.part = fade * self.part + part
        self.whole = fade * self.whole + whole

    def scale(self, weight: float) -> "DiscountedRatio":
        """Return the same ratio at another weight."""
        return DiscountedRatio(weight * self.part, weight * self.whole)
