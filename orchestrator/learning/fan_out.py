"""How many bonus-token candidates to prepare at each acceptance length (Theorem 12).

Under a tree a length is a row: the last accepted node.

Misses follow a power law, 1 - h(F) = a F^-r, the miss curve. Maximising sum_k P(k) h(F_k) under
sum_k F_k = B gives, for P(k) = alpha^k (1 - alpha), P(K) = alpha^K and one curve for all k, a
geometric series with a wider last term. In general, each branch goes where it gains most
(`allocate`), which is optimal because h is concave: with the assumed curves that is the series,
and with measured ones what the pair's own misses call for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol


@dataclass(frozen=True)
class MissCurve:
    """h(F) = 1 - scale * F^-exponent, the probability that F candidates hold the bonus token."""

    scale: float
    exponent: float

    def hit(self, candidates: int) -> float:
        """h(F); 0 for no candidates."""
        if candidates == 0:
            return 0.0
        misses: float = self.scale * candidates**-self.exponent
        return 1.0 - misses


AFTER_REJECTION = MissCurve(0.73, 0.385)
"""k < K, drafted token excluded; default pair: .27 .41 .49 .53 .64 .75 for F = 1 2 3 4 8 16."""

AFTER_ALL = MissCurve(0.40, 0.47)
"""k = K: .60 .71 .76 .80 .85 .89 for the same F."""


def acceptance_distribution(
    rates: Sequence[float], parents: Sequence[int] | None = None
) -> list[float]:
    """P(k) for k = 0..K: the probability that the accepted path ends in row k of a tree.

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


def count_children(parents: Sequence[int]) -> list[int]:
    """Per row of a tree, how many draft tokens stand behind it; row 0 is the pending token."""
    counts = [0] * (len(parents) + 1)
    for parent in parents:
        counts[parent] += 1
    return counts


class Curve(Protocol):
    """h(F), assumed or measured."""

    def hit(self, candidates: int) -> float:
        """Probability that the bonus token is among the first `candidates`."""
        ...


@dataclass(frozen=True)
class LaterCandidates:
    """h(F) where more than one draft token was rejected: the first candidates are ruled out."""

    curve: Curve
    """After a single rejection."""
    skipped: int
    """Further draft tokens that were rejected."""

    def hit(self, candidates: int) -> float:
        """Probability that the bonus token is among the `candidates` that follow those."""
        before = self.curve.hit(self.skipped)
        if before >= 1.0:
            return 0.0
        return (self.curve.hit(self.skipped + candidates) - before) / (1.0 - before)


def curves_of(drafted: Sequence[int], rejection: Curve, full: Curve) -> list[Curve]:
    """h(F) of each row, by how many draft tokens stood behind it and were rejected."""
    later: dict[int, Curve] = {0: full, 1: rejection}
    return [later.setdefault(n, LaterCandidates(rejection, n - 1)) for n in drafted]


def allocate(
    chances: Sequence[float],
    budget: int,
    rejection: Curve = AFTER_REJECTION,
    full: Curve = AFTER_ALL,
    drafted: Sequence[int] | None = None,
) -> list[int]:
    """F_0..F_K as integers: each of `budget` branches where P(k) (h(F+1) - h(F)) is largest.

    Args:
        chances: P(k) for k = 0..K.
        budget: B, the number of branches.
        rejection: h where a draft token was rejected.
        full: h where there was none.
        drafted: how many draft tokens stand behind each row; None is a chain, where one stands
            behind each k < K.
    """
    fan_out = [0] * len(chances)
    for position, _ in islice(_rank_branches(chances, rejection, full, drafted), budget):
        fan_out[position] += 1
    return fan_out


def outcome_chances(
    outcomes: Sequence[int], chances: Sequence[float], curves: Sequence[Curve]
) -> list[float]:
    """How likely each of some outcomes is.

    Args:
        outcomes: the row each is behind; of those behind one row the best candidate comes first.
        chances: P(k) of each row.
        curves: h of each row (`curves_of`).
    """
    seen, found = [0] * len(chances), []
    for row in outcomes:
        seen[row] += 1
        share = curves[row].hit(seen[row]) - curves[row].hit(seen[row] - 1)
        found.append(chances[row] * share)
    return found


def hit_chances(
    chances: Sequence[float],
    largest: int,
    rejection: Curve,
    full: Curve,
    drafted: Sequence[int] | None = None,
) -> list[float]:
    """Probability of a hit with 0, 1, ... `largest` branches, each where it gains most."""
    ranked = islice(_rank_branches(chances, rejection, full, drafted), largest)
    return list(accumulate((gain for _, gain in ranked), initial=0.0))


def _rank_branches(
    chances: Sequence[float], rejection: Curve, full: Curve, drafted: Sequence[int] | None
) -> Iterator[tuple[int, float]]:
    """The row where the next branch gains most, and that gain, without end."""
    if drafted is None:
        drafted = [1] * (len(chances) - 1) + [0]
    curves = curves_of(drafted, rejection, full)
    counts = [1] * len(chances)
    hits = [curve.hit(1) for curve in curves]
    gains = [chance * hit for chance, hit in zip(chances, hits, strict=True)]
    while True:
        best = gains.index(max(gains))
        yield best, gains[best]
        counts[best] += 1
        hit = curves[best].hit(counts[best])
        gains[best] = chances[best] * (hit - hits[best])
        hits[best] = hit
