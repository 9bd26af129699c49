"""h(F), learned: how often the bonus token is among a drafter's first F candidates.

A bonus token beyond the prepared candidates is known only to be beyond them, so what is
learned is the chance that candidate i is the one, given that the i before it are not
(a hazard, as in survival statistics).
"""

from orchestrator.learning.fan_out import MissCurve
from orchestrator.learning.snapshot import Shares

_RANKS = 32
"""Candidates whose chances are learned one by one; the prior speaks for those behind."""

_PRIOR = 6.0
"""Samples that the prior law counts for, per rank."""

_FADE = 0.995
"""Old samples fade, so that the curve follows the text."""

_RECALLED = 24.0
"""Most samples that a remembered rank counts for."""


class HitCurve:
    """One curve, for one kind of round."""

    def __init__(self, prior: MissCurve) -> None:
        self._prior = prior
        self._found = [_PRIOR * self._hazard(rank) for rank in range(_RANKS)]
        self._tried = [_PRIOR] * _RANKS
        self._missed = [1.0]
        """Per number of candidates, the chance that none is it, as far as anybody asked."""

    def _hazard(self, rank: int) -> float:
        before = self._prior.hit(rank)
        return (self._prior.hit(rank + 1) - before) / (1.0 - before)

    def observe(self, rank: int | None, prepared: int) -> None:
        """The bonus token was candidate `rank` (0 is the best) of `prepared`, or None of them."""
        for index in range(min(prepared if rank is None else rank + 1, _RANKS)):
            self._found[index] = _FADE * self._found[index] + float(index == rank)
            self._tried[index] = _FADE * self._tried[index] + 1.0
        self._missed = [1.0]

    def memory(self) -> Shares:
        """For another run."""
        return Shares(found=list(self._found), tried=list(self._tried))

    def recall(self, remembered: Shares) -> None:
        """Begin with what was known."""
        if remembered.fits(_RANKS):
            self._found, self._tried = remembered.weighing(_RECALLED)
            self._missed = [1.0]

    def hit(self, candidates: int) -> float:
        """Probability that the bonus token is among the first `candidates`; 0 for none."""
        missed = self._missed
        for rank in range(len(missed) - 1, candidates):
            learned = rank < _RANKS
            hazard = self._found[rank] / self._tried[rank] if learned else self._hazard(rank)
            missed.append(missed[-1] * (1.0 - hazard))
        return 1.0 - missed[candidates]
