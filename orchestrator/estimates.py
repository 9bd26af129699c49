"""What the orchestrator learns while it works: verification cost, and how drafts fare.

Shared by all requests of a stack. Pure: fed with events, asked for numbers.
"""

from collections.abc import Sequence

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

    def observe(self, tokens: int, milliseconds: float) -> None:
        """A verification of `tokens` tokens took this long."""
        milliseconds = max(milliseconds, _SHORTEST_MS)
        old = self._mean.get(tokens, milliseconds)
        # A single outlier (a page fault storm, a sleeping core) must not change plans.
        sample = min(milliseconds, 2.0 * old)
        self._mean[tokens] = old + _SMOOTHING * (sample - old)

    def of(self, tokens: int) -> float:
        """T_v(tokens): measured, between its measured neighbours, or assumed."""
        if tokens in self._mean:
            return self._mean[tokens]
        below = max((m for m in self._mean if m < tokens), default=None)
        above = min((m for m in self._mean if m > tokens), default=None)
        if below is not None and above is not None:
            share = (tokens - below) / (above - below)
            return self._mean[below] + share * (self._mean[above] - self._mean[below])
        if below is not None:
            return self._mean[below] * _assumed(tokens) / _assumed(below)
        if above is not None:
            return self._mean[above] * _assumed(tokens) / _assumed(above)
        return _assumed(tokens)


def _assumed(tokens: int) -> float:
    return 1.0 + _UNSEEN_STEP * (tokens - 1)


class Calibration:
    """Turns a drafter's confidence in a token into the rate at which such tokens are accepted."""

    _BINS = 10
    _PRIOR = 8.0
    """Samples that the assumption "confidence is acceptance" counts for, per bin."""

    def __init__(self) -> None:
        centres = [(index + 0.5) / self._BINS for index in range(self._BINS)]
        self._accepted = [self._PRIOR * centre for centre in centres]
        self._offered = [self._PRIOR] * self._BINS

    def rate(self, confidence: float) -> float:
        """Probability that a token of this confidence is accepted, given that it is reached."""
        index = self._bin(confidence)
        return self._accepted[index] / self._offered[index]

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """Of a chain's draft tokens the first `accepted` stood; the next one fell."""
        for index, confidence in enumerate(confidences[: accepted + 1]):
            place = self._bin(confidence)
            # Old samples fade, so that the rate follows the text.
            self._accepted[place] = 0.99 * self._accepted[place] + float(index < accepted)
            self._offered[place] = 0.99 * self._offered[place] + 1.0

    def _bin(self, confidence: float) -> int:
        return min(self._BINS - 1, max(0, int(confidence * self._BINS)))


class Estimates:
    """Everything that is learned, for the planner."""

    def __init__(self) -> None:
        self.verify_cost = VerifyCost()
        self.calibration = Calibration()
