"""T_v(m), learned: what verifying m tokens takes."""

_SMOOTHING = 0.1
"""Weight of a new sample in a running mean."""

_SHORTEST_MS = 1e-3
"""A clock may be too coarse to see a verification; no time at all would make it priceless."""

_UNSEEN_STEP = 0.15
"""Assumed extra cost per token, as a share of one token's, where nothing was measured."""


class VerifyCost:
    """T_v(m): time of a verification of m tokens, relative to nothing but itself."""

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}
        self._remembered: dict[int, float] = {}
        self._points: dict[int, float] = {}

    def observe(self, tokens: int, milliseconds: float) -> None:
        """A verification of `tokens` tokens took this long."""
        milliseconds = max(milliseconds, _SHORTEST_MS)
        old = self._mean.get(tokens, milliseconds)
        # A single outlier (a page fault storm, a sleeping core) must not change plans.
        sample = min(milliseconds, 2.0 * old)
        self._mean[tokens] = old + _SMOOTHING * (sample - old)
        self._points = self._known()

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
            return points[below] * _assumed(tokens) / _assumed(below)
        if above is not None:
            return points[above] * _assumed(tokens) / _assumed(above)
        return _assumed(tokens)

    def memory(self) -> dict[int, float]:
        """What is known, for another run."""
        return dict(self._points)

    def recall(self, remembered: dict[int, float]) -> None:
        """What was known; its shape is believed, its scale only until something is measured."""
        self._remembered = dict(remembered)
        self._points = self._known()

    def _known(self) -> dict[int, float]:
        """What was measured, and what is remembered at the speed of what was measured."""
        both = [m for m in self._mean if m in self._remembered]
        scale = sum(self._mean[m] / self._remembered[m] for m in both) / len(both) if both else 1.0
        # Without a common point nobody knows how today's speed compares.
        remembered = self._remembered if both or not self._mean else {}
        return {**{m: scale * ms for m, ms in remembered.items()}, **self._mean}


def _assumed(tokens: int) -> float:
    return 1.0 + _UNSEEN_STEP * (tokens - 1)
