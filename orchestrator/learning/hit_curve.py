"""The measured h(F): how often the bonus token is among a drafter's first F candidates.

A bonus token outside the prepared candidates is only known to be outside, so the estimate is the
probability that candidate i is the bonus token, given that the first i are not (a hazard, as in
survival statistics).
"""

from orchestrator.learning.averages import FADE, PRIOR, DiscountedRatio
from orchestrator.learning.fan_out import MissCurve

_RANKS = 32
"""Candidates with individual estimates; beyond them the prior holds."""


class HitCurve:
    """The curve for one kind of round."""

    def __init__(self, prior: MissCurve) -> None:
        self._prior = prior
        self._hazards = [
            DiscountedRatio(PRIOR * self._prior_hazard(rank), PRIOR) for rank in range(_RANKS)
        ]
        self._missed = [1.0]
        """Probability by number of candidates that none is the bonus token; computed on demand."""

    def _prior_hazard(self, rank: int) -> float:
        before = self._prior.hit(rank)
        return (self._prior.hit(rank + 1) - before) / (1.0 - before)

    def observe(self, rank: int | None, prepared: int) -> None:
        """Record which of the `prepared` candidates was the bonus token: 0 the best, None none."""
        for index in range(min(prepared if rank is None else rank + 1, _RANKS)):
            self._hazards[index].observe(float(index == rank), fade=FADE)
        self._missed = [1.0]

    def hit(self, candidates: int) -> float:
        """Return the probability that the bonus token is among the first `candidates`."""
        missed = self._missed
        for rank in range(len(missed) - 1, candidates):
            hazard = self._hazards[rank].value if rank < _RANKS else self._prior_hazard(rank)
            missed.append(missed[-1] * (1.0 - hazard))
        return 1.0 - missed[candidates]
