"""How many bonus-token candidates to prepare at each acceptance length (Theorem 12).

Misses follow a power law, 1 - p_hit(F) = F^-r. Maximising sum_k P(k) (1 - F_k^-r) under
sum_k F_k = B, with P(k) = alpha^k (1 - alpha) and P(K) = alpha^K, gives a geometric series
with a wider last term.
"""


def geometric(alpha: float, r: float, budget: int, lookahead: int) -> list[float]:
    """F_0..F_K as real numbers that sum to `budget`.

    Args:
        alpha: acceptance rate of a draft token, in (0, 1).
        r: exponent of the miss law, positive.
        budget: B, the number of branches.
        lookahead: K, the draft tokens of the chain under verification.
    """
    beta = alpha ** (1.0 / (1.0 + r))
    last = (1.0 - alpha) ** (-1.0 / (1.0 + r))
    weights = [beta**k for k in range(lookahead)] + [beta**lookahead * last]
    total = sum(weights)
    return [budget * weight / total for weight in weights]


def allocate(alpha: float, r: float, budget: int, lookahead: int) -> list[int]:
    """F_0..F_K as integers: each of `budget` slots goes where it gains most.

    The gain of the (F+1)-th candidate at k is P(k) (h(F+1) - h(F)), with h(0) = 0 and
    h(F) = 1 - (F+1)^-r: the miss law shifted by one, so that the first candidate has a
    finite gain too.
    """
    weights = [alpha**k * (1.0 - alpha) for k in range(lookahead)] + [alpha**lookahead]
    fan_out = [0] * (lookahead + 1)
    for _ in range(budget):
        gains = [
            weight * ((count + 1.0) ** -r - (count + 2.0) ** -r)
            for weight, count in zip(weights, fan_out, strict=True)
        ]
        fan_out[gains.index(max(gains))] += 1
    return fan_out
