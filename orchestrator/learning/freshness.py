"""Whether a measured speed still describes this machine: how old it is, and what has changed.

A speed that was measured in a busy moment says nothing of a quiet one. So it expires with
time, and as soon as passes of the same size take clearly longer or shorter than they did
when it was measured.
"""

from orchestrator.learning.averages import DiscountedRatio, Ema

LONGEST_S = 600.0
"""Seconds after which a speed is measured again before anything is decided by it."""
_MOST_CHANGE = 1.4
"""How much longer or shorter passes may become."""
_ENOUGH = 8
"""Passes before a change is believed: single ones scatter by a third."""
_REFERENCE = 3
"""Passes of a size that say how long it took when the figure was measured."""
_SMOOTHING = 0.2
_OUTLIER = 4.0
_SHORTEST_MS = 1e-3


class Freshness:
    """Of one figure; fed with the passes that go on after it was measured."""

    def __init__(self) -> None:
        self._measured_at: float | None = None
        self._reference: dict[int, DiscountedRatio] = {}
        """Milliseconds of the first passes after that over their number, by their tokens."""
        self._change = Ema(1.0, smoothing=_SMOOTHING)
        self._compared = 0

    def on_measured(self, now: float) -> None:
        """The figure has just been measured; `now` in seconds of a monotonic clock."""
        self._measured_at = now
        self._reference = {}
        self._change, self._compared = Ema(1.0, smoothing=_SMOOTHING), 0

    def observe(self, rows: int, milliseconds: float) -> None:
        """A pass of so many tokens took this long; always beside the same processes."""
        milliseconds = max(milliseconds, _SHORTEST_MS)
        reference = self._reference.setdefault(rows, DiscountedRatio())
        if reference.whole < _REFERENCE:
            reference.observe(milliseconds)
            return
        self._compared += 1
        self._change.observe(min(milliseconds / reference.value, _OUTLIER))

    def age_s(self, now: float) -> float | None:
        """Seconds since it was measured; None if it was not measured in this process."""
        return None if self._measured_at is None else max(0.0, now - self._measured_at)

    def is_old(self, now: float) -> bool:
        """Whether it was measured here, but too long ago."""
        age_s = self.age_s(now)
        return age_s is not None and age_s > LONGEST_S

    @property
    def has_changed(self) -> bool:
        """Whether passes take clearly longer or shorter than when it was measured."""
        if self._compared < _ENOUGH:
            return False
        return not 1.0 / _MOST_CHANGE < self._change.value < _MOST_CHANGE

    def is_expired(self, now: float) -> bool:
        """Whether it was measured here, but too long ago or on a machine that has changed."""
        return self._measured_at is not None and (self.is_old(now) or self.has_changed)
