"""Whether drafts could pay on a text, by how much of it the drafter would have foreseen.

A drafter that was left out for a while gets the tokens that were decoded without it, and computes
on the way which of them it would have drafted. So many tokens tell more than the rounds of a
trial do, and cost a fraction of a single one.
"""

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

_LEAST = 8
"""Tokens that say something."""
_MARGIN = 1.0
"""Standard errors by which the drafter may be better than it seems."""
_LONGEST = 6
"""Draft tokens in a round that are considered."""
_CLOSE = 0.97
"""Share of plain decoding's speed that is worth a trial: clocks are noisy."""


class RoundCosts(NamedTuple):
    """What rounds take, in milliseconds."""

    plain: float
    """A token of plain decoding."""
    verify: Callable[[int], float]
    """A verification of so many rows beside a drafter."""
    wait: float
    """Before it."""


def could_pay(foreseen: int, replayed: int, costs: RoundCosts) -> bool:
    """Whether drafts of any length could be as fast as plain decoding; True if it is not known.

    Args:
        foreseen: how many of the replayed tokens the drafter would have drafted.
        replayed: how many it looked at.
        costs: measured.
    """
    if replayed < _LEAST or costs.plain <= 0.0:
        return True
    seen = (foreseen + 0.5) / (replayed + 1.0)
    rate = min(1.0, seen + _MARGIN * sqrt(seen * (1.0 - seen) / replayed))
    tokens, likely = 1.0, 1.0
    for drafted in range(1, _LONGEST + 1):
        likely *= rate
        tokens += likely
        if tokens * costs.plain >= _CLOSE * (costs.wait + costs.verify(drafted + 1)):
            return True
    return False
