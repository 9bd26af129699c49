"""Fan-out: bonus-token candidates to prepare at each acceptance length (Theorem 12).

Under a tree a length is a row: the last accepted node.

Misses follow a power law, 1 - h(F) = a F^-r, the miss curve. Maximising sum_k P(k) h(F_k) under
sum_k F_k = B gives, for P(k) = alpha^k (1 - alpha), P(K) = alpha^K and one curve for all k, a
geometric series with a wider last term. In general, each branch is placed where it gains most
(`allocate`), which is optimal because h is concave: the assumed curves yield the series, measured
ones adapt to the pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class MissCurve:
    """h(F) = 1 - scale * F^-exponent, the probability that F candidates contain the bonus token."""

    scale: float
    exponent: float

    def hit(self, candidates: int) -> float:
        """Return h(F); 0 for no candidates."""
        if candidates == 0:
            return 0.0
        misses: float = self.scale * candidates**-self.exponent
        return 1.0 - misses


AFTER_REJECTION = MissCurve(0.73, 0.385)
"""Curve for k < K, drafted token excluded; default pair: .27 .41 .49 .53 .64 .75 for F = 1 2 3 4
8 16.
"""

AFTER_ALL = MissCurve(0.40, 0.47)
"""Curve for k = K: .60 .71 .76 .80 .85 .89 for the same F."""


class Curve(Protocol):
    """h(F), assumed or measured."""

    def hit(self, candidates: int) -> float:
        """Return the probability that the bonus token is among the first `candidates`."""
        ...


def acceptance_distribution(
    rates: Sequence[float], parents: Sequence[int] | None = None
) -> list[float]:
    """Return P(k) for k = 0..K: the probability that the accepted path ends in row k of a tree.

    Args:
        rates: the probability that each draft token is accepted, given that its parent is.
        parents: the row of each draft token's parent, which comes before it; None is a chain,
            where k is the number of accepted tokens.
    """
    reached, stays = [1.0], [1.0]
    for parent, rate in zip(range(len(rates)) if parents is None else parents, rates, strict=True):
        reached.append(reached[parent] * rate)
        stays[parent] = max(0.0, stays[parent] - rate)
        stays.append(1.0)
    return [chance * stay for chance, stay in zip(reached, stays, strict=True)]


def choose_curves(parents: Sequence[int], rejection: Curve, full: Curve) -> list[Curve]:
    """Return h(F) of each row: `rejection` where draft tokens follow it, else `full`."""
    inner = set(parents)
    return [rejection if row in inner else full for row in range(len(parents) + 1)]


def allocate(chances: Sequence[float], budget: int, curves: Sequence[Curve]) -> list[int]:
    """Return F_0..F_K: each of `budget` branches is placed where P(k) (h(F+1) - h(F)) is largest.

    Args:
        chances: P(k) for k = 0..K.
        budget: B, the number of branches.
        curves: h of each row (`choose_curves`).
    """
    counts, hits = [0] * len(chances), [0.0] * len(chances)
    nexts = [curve.hit(1) for curve in curves]
    gains = [chance * hit for chance, hit in zip(chances, nexts, strict=True)]
    for _ in range(budget):
        best = gains.index(max(gains))
        counts[best] += 1
        hits[best], nexts[best] = nexts[best], curves[best].hit(counts[best] + 1)
        gains[best] = chances[best] * (nexts[best] - hits[best])
    return counts
