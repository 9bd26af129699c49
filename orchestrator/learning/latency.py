"""How long forward passes take: T_v(m) of the target, T_d(B) of the drafter; milliseconds."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from orchestrator.learning.averages import Ema, smooth

_SHORTEST_MS = 1e-3
"""A clock may be too coarse to see a verification; no time at all would make it priceless."""
_UNSEEN_STEP = 0.15
"""Assumed extra time per token, as a share of one token's, where nothing was measured."""

_CHEAP_ROW = 0.04
"""A row that adds less than this share of a pass is cheap: siblings may pay."""
_WIDEST = 32
"""Rows up to which the price of a row is fitted: the tree that is worth verifying is smaller."""
_ASSUMED_ROW, _ROW_RIDGE = 0.08, 3.0
"""Assumed price of a row in that fit, as a share of a pass, and its weight: a variance of the row
counts, times samples."""
_MOST_SAMPLES = 10.0
"""What a count of rows counts for in that fit, however often it was measured."""
_EVIDENCE = 3.0
"""Samples of each of two counts of rows before their difference is believed: a slow first pass
makes the rows of the next ones look free, and a wide tree is a costly trial."""
_OUTLIER = 1.5
"""A first sample beyond this multiple of what was expected must be seen again, and later ones move
a mean by this factor at most."""
_MOST_DOUBTS = 2
"""How often, where what is expected was measured: on a GPU the first passes over so many rows make
their kernels or graphs, at several lengths of the text."""
_DOUBTED = 1.1
"""How much longer than expected such a sample counts as for other numbers of rows."""
_PACE_WEIGHT, _SHAPE_WEIGHT = 3.0, 10.0
"""Rounds that passes at load count for: of the machine's pace, and of what a number of rows takes
beside others. A machine is soon busier than at load; its kernels stay what they are."""

_STEP_SMOOTHING = 0.01
_NEARLY = 0.25
"""Share of a depth that may be missing for it to count as done: a verification varies by more."""
_RIDGE = 0.2
"""Weight of the assumed slope: a variance of the widths, in branches squared."""
_ASSUMED_SLOPE = 0.02
"""Assumed extra time per branch, as a share of a step, where only one width was measured."""


class _Fitted(NamedTuple):
    points: dict[int, float]
    """T_v of the numbers of rows that were measured."""
    row_ms: float | None
    """What a row adds."""


class VerifyLatency:
    """T_v(m): time of a verification of m tokens, as timed at load and in rounds since.

    Args:
        alike: what holds until anything was measured here; None: assumptions.
    """

    def __init__(self, alike: "VerifyLatency | None" = None) -> None:
        self._alike = alike
        self._mean: dict[int, float] = {}
        self._samples: dict[int, float] = {}
        self._doubts: dict[int, int] = {}
        self._expected: _Expected | None = None
        self._known: dict[int, float] = {}
        """What `of` said since something was measured: it is asked far more often."""
        self._fitted: _Fitted | None = None
        """What follows from all that is known, once it is asked for: most rounds do not."""

    def expect(self, passes: Mapping[int, float]) -> None:
        """So long took passes over so many rows at load; nothing measured before counts any more.

        Args:
            passes: milliseconds by rows; empty: nothing was measured.
        """
        leader = self._alike._expected if self._alike is not None else None  # of the same class
        self._expected = _Expected(passes, leader) if passes else None
        self._mean, self._samples, self._doubts = {}, {}, {}
        self._update()

    def observe(self, tokens: int, milliseconds: float) -> None:
        """A verification of `tokens` tokens took this long."""
        milliseconds = max(milliseconds, _SHORTEST_MS)
        if self._is_doubtful(tokens, milliseconds):
            self._doubts[tokens] = self._doubts.get(tokens, 0) + 1
            if self._expected is not None:
                # Every pass may take as long by now.
                self._expected.observe_pace(tokens, milliseconds, at_most=_DOUBTED)
                self._update()
            return
        if self._expected is not None:
            self._expected.observe(tokens, milliseconds)
        else:
            old = self._mean.get(tokens, milliseconds)
            # A single outlier (a page fault storm, a sleeping core) must not change plans.
            self._mean[tokens] = smooth(old, min(milliseconds, 2.0 * old))
        self._samples[tokens] = min(_MOST_SAMPLES, self._samples.get(tokens, 0.0) + 1.0)
        self._update()

    def _update(self) -> None:
        self._known, self._fitted = {}, None

    @property
    def _fit(self) -> "_Fitted":
        if self._fitted is None or self._is_led:
            points = dict(self._mean) if self._expected is None else self._expected.points
            self._fitted = _Fitted(points, self._fit_row_ms(points))
        return self._fitted

    @property
    def _is_led(self) -> bool:
        """Whether what another curve sees changes what holds here."""
        return self._expected is not None and self._expected.is_led

    def _is_doubtful(self, tokens: int, milliseconds: float) -> bool:
        """Whether this is one of the first samples of a wide pass, and much longer than expected.

        Where rows are cheap a wide tree is tried because it should cost little. Its first pass may
        have compiled a kernel; believing that would end the trials for good.
        """
        if tokens in self._samples or milliseconds <= _OUTLIER * self.of(tokens):
            return False
        if self._expected is not None:
            return self._doubts.get(tokens, 0) < _MOST_DOUBTS
        cheap = self.has_cheap_rows or (self._alike is not None and self._alike.has_cheap_rows)
        return cheap and tokens not in self._doubts

    @property
    def is_known(self) -> bool:
        """Whether anything was measured here, at load or in rounds."""
        return bool(self._expected or self._mean)

    @property
    def is_observed(self) -> bool:
        """Whether rounds were."""
        return bool(self._samples)

    def of(self, tokens: int) -> float:
        """T_v(tokens): measured, between its measured neighbours, or assumed."""
        if not self.is_known and self._alike is not None:
            return self._alike.of(tokens)
        if (known := self._known.get(tokens)) is None or self._is_led:
            known = self._known[tokens] = self._estimate(tokens)
        return known

    def _estimate(self, tokens: int) -> float:
        if self._expected is not None:
            return self._expected.of(tokens)
        points = self._fit.points
        below = max((m for m in points if m <= tokens), default=None)
        above = min((m for m in points if m >= tokens), default=None)
        if below is not None and above is not None:
            return _interpolate(points, tokens)
        return self._extrapolate(tokens, below, above)

    def _extrapolate(self, tokens: int, below: int | None, above: int | None) -> float:
        points, row_ms = self._fit.points, self._cheap_row_ms
        if below is not None and row_ms is not None:
            return points[below] + (tokens - below) * row_ms
        if below is not None:
            return points[below] * _assume(tokens) / _assume(below)
        if above is not None:
            lower = points[above] * _assume(tokens) / _assume(above)
            if row_ms is None or self._alike is None:
                return lower
            return max(lower, points[above] - (above - tokens) * row_ms)
        return _assume(tokens)

    @property
    def has_cheap_rows(self) -> bool:
        """Whether further rows were measured to add little to a pass of two or more."""
        if self._fit.row_ms is None or not self._has_evidence:
            return False
        return self._fit.row_ms < _CHEAP_ROW * min(
            ms for m, ms in self._fit.points.items() if m > 1
        )

    @property
    def _has_evidence(self) -> bool:
        """Whether two counts of rows above 1 have been measured more than once, here or before."""
        often = {m for m, count in self._samples.items() if count >= _EVIDENCE}
        before = {} if self._expected is None else self._expected.measured
        return len({m for m in often | before.keys() if m > 1}) >= 2

    @property
    def _cheap_row_ms(self) -> float | None:
        """What a further row adds, where it adds little; of what is alike if it is not known."""
        row_ms = self._fit.row_ms
        if row_ms is None and self._alike is not None:
            return self._alike._cheap_row_ms  # of the same class
        return row_ms if self.has_cheap_rows else None

    def _fit_row_ms(self, known: Mapping[int, float]) -> float | None:
        """What a row adds, by least squares; None where two counts above 1 were not measured.

        The step from one row to two is left out: other kernels begin there.
        """
        points = [(m, ms) for m, ms in known.items() if 1 < m <= _WIDEST]
        if len(points) < 2:
            return None
        weights = [self._samples.get(m, 1.0) for m, _ in points]
        total = sum(weights)
        pairs = list(zip(weights, points, strict=True))
        mean_m = sum(w * m for w, (m, _) in pairs) / total
        mean_ms = sum(w * ms for w, (_, ms) in pairs) / total
        spread = sum(w * (m - mean_m) ** 2 for w, (m, _) in pairs)
        common = sum(w * (m - mean_m) * (ms - mean_ms) for w, (m, ms) in pairs)
        # A little of the assumed price keeps a few samples from meaning anything.
        assumed = _ASSUMED_ROW * mean_ms
        if self._alike is not None:
            assumed = min(assumed, self._alike._cheap_row_ms or assumed)
        return max(0.0, (common + _ROW_RIDGE * assumed) / (spread + _ROW_RIDGE))


class _Expected:
    """The times of passes at load, at the pace of those since, and what single sizes deviate by.

    Args:
        measured: milliseconds by rows.
        leader: of a curve whose passes tell how long these take now, until one was seen here.
    """

    def __init__(self, measured: Mapping[int, float], leader: "_Expected | None") -> None:
        self.measured = dict(sorted(measured.items()))
        self._leader = leader
        self._pace: Ema | None = None
        """Of all passes, as a share of what they took at load; None: nothing was seen here."""
        self._deviations: dict[int, Ema] = {}
        """Of single numbers of rows, as a share."""

    @property
    def is_led(self) -> bool:
        """Whether nothing was seen here yet, and another curve's passes count."""
        return self._pace is None and self._leader is not None

    def observe_pace(self, rows: int, milliseconds: float, at_most: float) -> None:
        """A pass took this long, whatever the reason; the pace changes by this factor at most."""
        if self._pace is None:
            self._pace = Ema(self._find_factor(rows), weight=_PACE_WEIGHT)
        self._pace.observe(self._pace.value * _clip(milliseconds / self.of(rows), at_most))

    def observe(self, rows: int, milliseconds: float) -> None:
        """A pass over so many rows took this long; what took far longer counts as longer."""
        self.observe_pace(rows, milliseconds, _OUTLIER)
        own = self._deviations.setdefault(rows, Ema(1.0, weight=_SHAPE_WEIGHT))
        own.observe(own.value * _clip(milliseconds / self.of(rows), _OUTLIER))

    def of(self, rows: int) -> float:
        """What a pass over so many rows takes, in milliseconds."""
        return self._shape(rows) * self._find_factor(rows)

    def _find_factor(self, rows: int) -> float:
        """What such a pass takes now, as a share of what it took at load."""
        if self._pace is None:
            return 1.0 if self._leader is None else self._leader._find_factor(rows)
        if (own := self._deviations.get(rows)) is not None:
            return self._pace.value * own.value
        if not self._deviations:
            return self._pace.value
        deviations = {m: deviation.value for m, deviation in self._deviations.items()}
        return self._pace.value * _interpolate(deviations, rows)

    @property
    def points(self) -> dict[int, float]:
        """What was measured, at load or since."""
        return {rows: self.of(rows) for rows in self.measured | self._deviations}

    def _shape(self, rows: int) -> float:
        longest = max(self.measured)
        if rows <= longest:
            return _interpolate(self.measured, rows)
        if len(self.measured) == 1:
            return self.measured[longest] * _assume(rows) / _assume(longest)
        others = [m for m in self.measured if m < longest]
        # Two neighbours alone may make further rows look free.
        starts = (others[-1], next((m for m in others if m > 1), others[-1]))
        longest_ms = self.measured[longest]
        row_ms = max((longest_ms - self.measured[m]) / (longest - m) for m in starts)
        return longest_ms + (rows - longest) * max(0.0, row_ms)


def _clip(share: float, at_most: float) -> float:
    return min(max(share, 1.0 / at_most), at_most)


def _interpolate(points: Mapping[int, float], place: int) -> float:
    """The value at a place, from those at the places beside it; beyond the last one, its value."""
    if (value := points.get(place)) is not None:
        return value
    places = sorted(points)
    return float(np.interp(place, places, [points[one] for one in places]))


def _assume(tokens: int) -> float:
    return 1.0 + _UNSEEN_STEP * (tokens - 1)


class StepLatency:
    """T_d(B): a tree step is a straight line in its branches; the first also takes in the chain."""

    def __init__(self) -> None:
        names = ("branches", "milliseconds", "squares", "products", "first_ms", "chain_ms")
        self._means = {name: Ema(smoothing=_STEP_SMOOTHING) for name in names}

    def observe(self, depth: int, branches: int, milliseconds: float) -> None:
        """One depth of `branches` branches took this long."""
        if depth == 1:
            self._observe_first(branches, milliseconds)
            return
        self._means["branches"].observe(branches)
        self._means["milliseconds"].observe(milliseconds)
        self._means["squares"].observe(branches**2)
        self._means["products"].observe(branches * milliseconds)

    def _observe_first(self, branches: int, milliseconds: float) -> None:
        self._means["first_ms"].observe(milliseconds)
        if not self._has_steps:
            self._means["branches"].value = float(branches)
            return
        self._means["chain_ms"].observe(max(0.0, milliseconds - self.of(branches)))

    @property
    def _has_steps(self) -> bool:
        return self._means["branches"].is_known

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._has_steps or self._means["first_ms"].is_known

    @property
    def chain_ms(self) -> float:
        """What the first depth takes beyond a step; half of it until a step was seen."""
        if self._has_steps:
            return self._means["chain_ms"].value
        return 0.5 * self._means["first_ms"].value

    def of(self, branches: int) -> float:
        """A step over this many branches, at least half of the mean step; 0 if none is known."""
        usual = self._means["branches"].value
        if not self._has_steps:
            mean = 0.5 * self._means["first_ms"].value
            return max(0.5 * mean, mean * (1.0 + _ASSUMED_SLOPE * (branches - usual)))
        mean = self._means["milliseconds"].value
        variance = self._means["squares"].value - usual**2
        covariance = self._means["products"].value - usual * mean
        # A little of the assumed slope keeps a single width from meaning anything.
        slope = (covariance + _RIDGE * _ASSUMED_SLOPE * mean) / (max(0.0, variance) + _RIDGE)
        return max(0.5 * mean, mean + max(0.0, slope) * (branches - usual))

    def depths_in(self, milliseconds: float, branches: int) -> int | None:
        """How many depths of so many branches get done in this time; None if it is not known."""
        step_ms = self.of(branches)
        return int((milliseconds - self.chain_ms) / step_ms + _NEARLY) if step_ms else None
