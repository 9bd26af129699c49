"""How far one text can be trusted to repeat itself as texts did before.

At what rate looked-up tokens are right is learned over all texts, but differs between them: an
answer that quotes its prompt takes nearly all, one about a long prompt hardly any. What a text
has shown by itself scales the common rate.
"""

from orchestrator.learning.averages import DiscountedRatio

_PRIOR = 2.0
"""Expected hits that the common rate counts for."""
_FADE = 0.95
"""Per token that was looked up: a text may begin to repeat itself."""


class TextTrust:
    """Of one request's text; fed with every looked-up token whose rightness is known."""

    def __init__(self) -> None:
        self._right = DiscountedRatio(_PRIOR, _PRIOR)

    @property
    def factor(self) -> float:
        """What the common rate is multiplied with, at most 1."""
        return min(1.0, self._right.value)

    def observe(self, rate: float, *, right: bool) -> None:
        """A token that was expected to be right at this rate, and whether it was."""
        self._right.observe(float(right), rate, fade=_FADE)
