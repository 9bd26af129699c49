"""Whether drafts are good for anything at all: Wald's sequential test on what is accepted.

That nothing is accepted is known after some rounds, however little a round loses by it and
however noisy the clock is. The test weighs two Poisson laws of the accepted tokens of a
round: a drafter that knows something, and one that knows nothing. It only ever ends a
trial; whether a drafter that knows something pays is for the clock to say (`pace`).
"""

from dataclasses import dataclass
from math import log

_KNOWING, _KNOWING_NOTHING = 0.2, 0.01
"""Accepted tokens per round."""
_FIRST, _AGAIN = 2.7, 1.5
"""Evidence that is needed, as the logarithm of a likelihood ratio: 15 to 1 the first time;
less once the drafter is known for it."""


@dataclass
class FutilityTest:
    """Fed with the rounds of a trial."""

    _needed: float = _FIRST
    _evidence: float = 0.0
    """For knowing nothing; below 0 for knowing something, which is kept."""

    def observe(self, accepted: int, chains: int) -> None:
        """A pass with so many chains accepted so many draft tokens."""
        against = log(_KNOWING / _KNOWING_NOTHING) * accepted
        self._evidence += (_KNOWING - _KNOWING_NOTHING) * chains - against

    @property
    def settled(self) -> bool:
        """Whether the drafter knows nothing."""
        return self._evidence >= self._needed

    def confirmed(self) -> "FutilityTest":
        """For the next trial of a drafter that did not pay."""
        return FutilityTest(_AGAIN)

    def forgotten(self) -> "FutilityTest":
        """For a drafter that has just been ahead of plain decoding."""
        return FutilityTest(_evidence=min(0.0, self._evidence))
