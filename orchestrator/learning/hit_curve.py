"""h(F), measured: how often the bonus token is among a drafter's first F candidates.

A bonus token beyond the prepared candidates is only known to be beyond them, so the estimate is
the chance that candidate i is the one, given that the i before it are not (a hazard, as in
survival statistics).
"""

from orchestrator.learning.averages import DiscountedRatio
from orchestrator.learning.fan_out import MissCurve

_RANKS = 32
"""Candidates whose chances are measured one by one; behind them the prior holds."""
_PRIOR = 6.0
"""Samples that the prior curve counts for, per rank."""
_FADE = 0.995


class HitCurve:
    """One curve, for one kind of round."""

    def __init__(self, prior: MissCurve) -> None:
        self._prior = prior
        self._hazards = [
            DiscountedRatio(_PRIOR * self._prior_hazard(rank), _PRIOR) for rank in range(_RANKS)
        ]
        self._missed = [1.0]
        """Per number of candidates, the chance that none is it: computed as it is needed."""

    def _prior_hazard(self, rank: int) -> float:
        before = self._prior.hit(rank)
        return (self._prior.hit(rank + 1) - before) / (1.0 - before)

    def observe(self, rank: int | None, prepared: int) -> None:
        """Take in a bonus token: candidate `rank` (0 is the best) of `prepared`, or none."""
        for index in range(min(prepared if rank is None else rank + 1, _RANKS)):
            self._hazards[index].observe(float(index == rank), fade=_FADE)
        self._missed = [1.0]

    def hit(self, candidates: int) -> float:
        """Return the probability that the bonus token is among the first `candidates`."""
        missed = self._missed
        for rank in range(len(missed) - 1, candidates):
            hazard = self._hazards[rank].value if rank < _RANKS else self._prior_hazard(rank)
            missed.append(missed[-1] * (1.0 - hazard))
        return 1.0 - missed[candidates]
