"""How long forward passes take: T_v(m) of the target, T_d(B) of the drafter; milliseconds."""

from collections.abc import Mapping

from orchestrator.learning.averages import Ema, smooth
from orchestrator.learning.snapshot import Average

_SHORTEST_MS = 1e-3
"""A clock may be too coarse to see a verification; no time at all would make it priceless."""
_UNSEEN_STEP = 0.15
"""Assumed extra time per token, as a share of one token's, where nothing was measured."""

_STEP_SMOOTHING = 0.01
_STEP_RECALLED = 8.0
_RIDGE = 0.2
"""Weight of the assumed slope: a variance of the widths, in branches squared."""
_ASSUMED_SLOPE = 0.02
"""Assumed extra time per branch, as a share of a step, where only one width was measured."""


class VerifyLatency:
    """T_v(m): time of a verification of m tokens."""

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}
        self._restored: dict[int, float] = {}
        self._points: dict[int, float] = {}

    def observe(self, tokens: int, milliseconds: float) -> None:
        """A verification of `tokens` tokens took this long."""
        milliseconds = max(milliseconds, _SHORTEST_MS)
        old = self._mean.get(tokens, milliseconds)
        # A single outlier (a page fault storm, a sleeping core) must not change plans.
        self._mean[tokens] = smooth(old, min(milliseconds, 2.0 * old))
        self._points = self._merge()

    def of(self, tokens: int) -> float:
        """T_v(tokens): measured, between its measured neighbours, or assumed."""
        points = self._points
        if tokens in points:
            return points[tokens]
        below = max((m for m in points if m < tokens), default=None)
        above = min((m for m in points if m > tokens), default=None)
        if below is not None and above is not None:
            share = (tokens - below) / (above - below)
            return points[below] + share * (points[above] - points[below])
        if below is not None:
            return points[below] * _assume(tokens) / _assume(below)
        if above is not None:
            return points[above] * _assume(tokens) / _assume(above)
        return _assume(tokens)

    def save(self) -> dict[int, float]:
        """For a snapshot."""
        return dict(self._points)

    def restore(self, saved: dict[int, float]) -> None:
        """Start from a snapshot; its shape holds, its scale only until something is measured."""
        self._restored = dict(saved)
        self._points = self._merge()

    def _merge(self) -> dict[int, float]:
        """What was measured, and what was restored at the speed of what was measured."""
        both = [m for m in self._mean if m in self._restored]
        scale = sum(self._mean[m] / self._restored[m] for m in both) / len(both) if both else 1.0
        # Without a common point today's speed cannot be compared with that of the snapshot.
        restored = self._restored if both or not self._mean else {}
        return {**{m: scale * ms for m, ms in restored.items()}, **self._mean}


def _assume(tokens: int) -> float:
    return 1.0 + _UNSEEN_STEP * (tokens - 1)


class StepLatency:
    """T_d(B): a tree step is a straight line in its branches; the first also takes in the chain."""

    def __init__(self) -> None:
        names = ("branches", "milliseconds", "squares", "products", "first_ms", "chain_ms")
        self._means = {
            name: Ema(smoothing=_STEP_SMOOTHING, recalled=_STEP_RECALLED) for name in names
        }

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

    def save(self) -> dict[str, Average]:
        """For a snapshot."""
        return {name: mean.save() for name, mean in self._means.items()}

    def restore(self, saved: Mapping[str, Average]) -> None:
        """Start from a snapshot."""
        for name, mean in self._means.items():
            if name in saved:
                mean.restore(saved[name])
        if "branches" in saved and not self._has_steps:
            self._means["branches"].value = saved["branches"].value
