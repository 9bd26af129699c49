"""Latency of forward passes: T_v(m) of the target, T_d of the drafter; milliseconds."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from orchestrator.learning.averages import Ema

_SHORTEST_MS = 1e-3
"""A clock may be too coarse to measure a pass, which would then seem to be free."""
_UNSEEN_ROW = 0.15
"""Assumed extra time of a further row, relative to one row, where only one size was timed."""
STALL = 1.5
"""Cap of a pass or a wait, as a multiple of its usual time: the first passes of a size compile
kernels, and other programs use the cores.
"""
_TABLED = 65
"""Sizes of passes that are looked up."""
_PACE_WEIGHT, _SHAPE_WEIGHT = 3.0, 10.0
"""Number of rounds that the passes at load count as: for their pace, and for the relative time
of a size. A machine soon becomes busier than at load; its kernels do not change.
"""


class VerifyLatency:
    """T_v(m): the time of a pass over m rows.

    The curve measured at load, scaled by the pace of all passes since, and corrected for the
    deviation of single sizes.
    """

    def __init__(self) -> None:
        self.expect({})

    def expect(
        self, passes: Mapping[int, float], uncontended: "VerifyLatency | None" = None
    ) -> None:
        """Start from passes that were timed at load.

        Args:
            passes: milliseconds by rows; empty: nothing was timed, and the first pass sets the
                scale.
            uncontended: estimates of the same machine without contention, which is no slower.
        """
        sizes = sorted(passes, reverse=True)
        # More rows are no faster: what a pass took longer than one of more rows was a stall.
        least = accumulate((passes[rows] for rows in sizes), min)
        self._at_load = dict(sorted(zip(sizes, least, strict=True))) or {1: 1.0}
        self._pace = Ema(1.0, weight=_PACE_WEIGHT if passes else 0.0)
        self._uncontended = uncontended
        self._deviations: dict[int, Ema] = {}
        self._shapes = np.array([self._shape(rows) for rows in range(_TABLED)])
        self._table: list[float] = self._shapes.tolist()
        self.is_known = bool(passes)
        """True if anything was measured, at load or in rounds."""
        self.is_observed = False
        """True if rounds were measured."""

    def observe(self, rows: int, milliseconds: float) -> None:
        """Add a pass over this many rows."""
        milliseconds = max(milliseconds, _SHORTEST_MS)
        if not self.is_known:
            self._pace.observe(milliseconds / self.of(rows))
        else:
            self._pace.observe(self.pace * self._compare(rows, milliseconds))
            deviation = self._deviations.setdefault(rows, Ema(1.0, weight=_SHAPE_WEIGHT))
            deviation.observe(deviation.value * self._compare(rows, milliseconds))
            # Now, since the target waits when a time is looked up.
            self._table = (self._shapes * self._factor(range(_TABLED))).tolist()
        self.is_known = self.is_observed = True

    def of(self, rows: int) -> float:
        """Return T_v(rows): measured, interpolated, or extrapolated."""
        if rows < _TABLED:
            return self._table[rows] * self.pace
        factor = self._factor(rows) if self._deviations else 1.0
        return float(self._shape(rows) * factor * self.pace)

    def of_up_to(self, fewest: int, most: int) -> list[float]:
        """Return T_v of each number of rows from `fewest` to `most`."""
        if most >= _TABLED:
            return [self.of(rows) for rows in range(fewest, most + 1)]
        pace = self.pace
        return [shape_ms * pace for shape_ms in self._table[fewest : most + 1]]

    @property
    def pace(self) -> float:
        """Time of passes relative to that at load."""
        least = 0.0 if self._uncontended is None else self._uncontended.pace
        return max(self._pace.value, least)

    def _factor(self, rows: int | Sequence[int]) -> Any:
        """Return the deviation of each size: measured, interpolated, or that of the nearest."""
        sizes = sorted(self._deviations)
        return np.interp(rows, sizes, [self._deviations[size].value for size in sizes])

    def _compare(self, rows: int, milliseconds: float) -> float:
        """Return the ratio of the pass's time to the expected time, within limits."""
        return min(max(milliseconds / self.of(rows), 1.0 / STALL), STALL)

    def _shape(self, rows: int) -> float:
        longest = max(self._at_load)
        longest_ms = self._at_load[longest]
        if len(self._at_load) == 1:
            return longest_ms * _assume(rows) / _assume(longest)
        if rows <= longest:
            return float(np.interp(rows, [*self._at_load], [*self._at_load.values()]))
        others = [m for m in self._at_load if m < longest]
        # With two neighbours only, further rows may seem to cost nothing.
        starts = (others[-1], next((m for m in others if m > 1), others[-1]))
        row_ms = max((longest_ms - self._at_load[m]) / (longest - m) for m in starts)
        return longest_ms + (rows - longest) * max(0.0, row_ms)


class StepLatency:
    """T_d: the time of one depth of all branches; the first depth also processes the chain."""

    def __init__(self) -> None:
        self._first_ms, self._later_ms = Ema(), Ema()

    def observe(self, depth: int, milliseconds: float) -> None:
        """Add one depth."""
        (self._first_ms if depth == 1 else self._later_ms).observe(milliseconds)

    @property
    def step_ms(self) -> float:
        """Time of a depth after the first; until measured, half of the first, or 0."""
        return self._later_ms.value if self._later_ms.is_known else 0.5 * self._first_ms.value

    def depths_in(self, milliseconds: float) -> int:
        """Return the number of depths that complete in this time."""
        chain_ms = max(0.0, self._first_ms.value - self.step_ms)
        return int((milliseconds - chain_ms) / max(_SHORTEST_MS, self.step_ms))


def _assume(rows: int) -> float:
    return 1.0 + _UNSEEN_ROW * (rows - 1)
