"""How many bonus-token candidates to prepare at each acceptance length (Theorem 12).

Misses follow a power law, 1 - h(F) = a F^-r, the miss curve. Maximising sum_k P(k) h(F_k) under
sum_k F_k = B gives, for P(k) = alpha^k (1 - alpha), P(K) = alpha^K and one curve for all k, a
geometric series with a wider last term (`geometric`). In general, each branch goes where it
gains most (`allocate`), which is optimal because h is concave.
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


def geometric(alpha: float, r: float, budget: int, num_draft_tokens: int) -> list[float]:
    """Theorem 12: F_0..F_K as real numbers that sum to `budget`.

    Args:
        alpha: acceptance rate of a draft token, in (0, 1).
        r: exponent of the miss curve, positive.
        budget: B, the number of branches.
        num_draft_tokens: K, the draft tokens of the chain under verification.
    """
    beta = alpha ** (1.0 / (1.0 + r))
    last = (1.0 - alpha) ** (-1.0 / (1.0 + r))
    weights = [beta**k for k in range(num_draft_tokens)] + [beta**num_draft_tokens * last]
    total = sum(weights)
    return [budget * weight / total for weight in weights]


def acceptance_distribution(rates: Sequence[float]) -> list[float]:
    """P(k) for k = 0..K, given the acceptance probability of each draft token in turn."""
    chances: list[float] = []
    reached = 1.0
    for rate in rates:
        chances.append(reached * (1.0 - rate))
        reached *= rate
    return [*chances, reached]


def uniform(budget: int, num_draft_tokens: int) -> list[int]:
    """The same number at every acceptance length; what is left over goes to the first ones."""
    each, rest = divmod(budget, num_draft_tokens + 1)
    return [each + int(k < rest) for k in range(num_draft_tokens + 1)]


def round_shares(counts: Sequence[float]) -> list[int]:
    """Round to whole numbers with the same sum: the largest remainders are rounded up."""
    whole = [int(count) for count in counts]
    rest = round(sum(counts)) - sum(whole)
    by_remainder = sorted(range(len(counts)), key=lambda k: whole[k] - counts[k])
    for k in by_remainder[:rest]:
        whole[k] += 1
    return whole


class Curve(Protocol):
    """h(F), assumed or measured."""

    def hit(self, candidates: int) -> float:
        """Probability that the bonus token is among the first `candidates`."""
        ...


def allocate(
    chances: Sequence[float],
    budget: int,
    rejection: Curve = AFTER_REJECTION,
    full: Curve = AFTER_ALL,
) -> list[int]:
    """F_0..F_K as integers: each of `budget` branches where P(k) (h(F+1) - h(F)) is largest.

    Args:
        chances: P(k) for k = 0..K.
        budget: B, the number of branches.
        rejection: h where a draft token was rejected, k < K.
        full: h where all were accepted, k = K.
    """
    fan_out = [0] * len(chances)
    for position, _ in islice(_rank_branches(chances, rejection, full), budget):
        fan_out[position] += 1
    return fan_out


def hit_chances(
    chances: Sequence[float], largest: int, rejection: Curve, full: Curve
) -> list[float]:
    """Probability of a hit with 0, 1, ... `largest` branches, each where it gains most."""
    gains = (gain for _, gain in islice(_rank_branches(chances, rejection, full), largest))
    return list(accumulate(gains, initial=0.0))


def _rank_branches(
    chances: Sequence[float], rejection: Curve, full: Curve
) -> Iterator[tuple[int, float]]:
    """The acceptance length where the next branch gains most, and that gain, without end."""
    curves = [rejection] * (len(chances) - 1) + [full]
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
