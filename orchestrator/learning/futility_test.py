"""Whether drafts are accepted at all: Wald's sequential test on the accepted tokens.

That nothing is accepted is known after a few rounds, however little a round loses by it and
however noisy the clock is. The test weighs two Poisson distributions of the accepted tokens
of a round against each other: that of a drafter with some knowledge of the text, and that of
one with none. It only ever ends a trial; whether a drafter with some knowledge pays is
decided by the clock (`speculation_switch`).
"""

from dataclasses import dataclass
from math import log

_USEFUL, _USELESS = 0.2, 0.01
"""Accepted tokens per round."""
_FIRST, _AGAIN = 2.7, 1.5
"""Evidence that is required, as the logarithm of a likelihood ratio: 15 to 1 the first time;
less for a drafter that has failed before."""


@dataclass
class FutilityTest:
    """Fed with the rounds of a trial."""

    _required: float = _FIRST
    _evidence: float = 0.0
    """That the drafter is useless; below 0 that it is useful, which is kept."""

    def observe(self, accepted: int, chains: int) -> None:
        """A pass with `chains` chains accepted `accepted` draft tokens."""
        against = log(_USEFUL / _USELESS) * accepted
        self._evidence += (_USEFUL - _USELESS) * chains - against

    @property
    def is_futile(self) -> bool:
        """Whether the drafter is useless."""
        return self._evidence >= self._required

    def for_next_trial(self) -> "FutilityTest":
        """The test of the next trial, after one that did not pay."""
        return FutilityTest(_AGAIN)

    def after_gain(self) -> "FutilityTest":
        """The test of a drafter that has just been ahead of plain decoding."""
        return FutilityTest(_evidence=min(0.0, self._evidence))
