"""Sampling of tokens from logits: the coupled rule, exact, on the host.

The target's token is `argmax(log p / T + g)` over the tokens kept by the filters, with the Gumbel
noise `g` of `gumbel.py`: an exact sample of the filtered distribution, and a pure function of
(logits, position, Sampling). Greedy is temperature 0. A drafter uses the same noise on its own
logits, so that it tends to propose the same token (docs/architecture.md, "Acceptance").

Filters see the distribution at temperature 1 and the temperature comes last, as in mlx-lm and
llama.cpp. Each keeps a prefix of the tokens in falling order of probability, so together they keep
the shortest of these prefixes.
"""

from collections.abc import Sequence
from math import exp, log

import numpy as np
import numpy.typing as npt

from protocol.decoding.gumbel import gumbel, gumbel_from_bits, hash_bits
from protocol.decoding.sampling_params import is_greedy
from protocol.messages import Sampling

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

# Tokens this far (in nats) below the best one are examined only if their noise requires it.
_NEAR = 12.0
_DROPPED = np.float32(1e4)
"""Penalty that keeps filtered tokens below all others."""


def sample(logits: Floats, positions: Sequence[int], sampling: Sampling) -> list[int]:
    """Return one token per row.

    Args:
        logits: [rows, vocabulary] float32, unnormalised.
        positions: [rows] the absolute position that each chosen token will have.
    """
    if is_greedy(sampling):
        return [int(token) for token in np.argmax(logits, axis=-1)]
    return [
        _sample_row(row, position, sampling)
        for row, position in zip(logits, positions, strict=True)
    ]


def _sample_row(row: Floats, position: int, sampling: Sampling) -> int:
    if has_filter(sampling):
        ids = filter_tokens(row, sampling)
        return int(ids[np.argmax(_score(row[ids], ids, position, sampling))])
    return _sample_unfiltered(row, position, sampling)


def _score(logits: Floats, ids: Ids, position: int, sampling: Sampling) -> Floats:
    noise = gumbel(np, sampling.seed, [position], ids.astype(np.uint32)[None])[0]
    scores: Floats = logits / np.float32(sampling.temperature) + noise
    return scores


def _sample_unfiltered(row: Floats, position: int, sampling: Sampling) -> int:
    """Return the argmax over the whole vocabulary, transforming few tokens only.

    A token more than `_NEAR * T` below the best logit wins only with a noise above a known bound,
    and noise above a bound is hash bits below one: an integer comparison.
    """
    top = float(row.max())
    all_ids = np.arange(row.size, dtype=np.uint32)
    bits = hash_bits(np, sampling.seed, [position], all_ids[None])[0]
    near = np.flatnonzero(row >= top - _NEAR * sampling.temperature)
    scores = row[near] / np.float32(sampling.temperature) + gumbel_from_bits(np, bits[near])
    best = int(np.argmax(scores))
    bound = float(scores[best]) - top / sampling.temperature + _NEAR
    # P(g > bound) = 1 - exp(-exp(-bound)); one part in 1e5 allows for float32 rounding.
    limit = min(2.0**32 - 1, 2.0**32 * (1.0 - exp(-exp(-bound))) * 1.00001 + 1.0)
    rivals = np.flatnonzero(bits <= np.uint32(limit))
    candidates = np.union1d(near, rivals)
    if candidates.size > near.size:
        scores = row[candidates] / np.float32(sampling.temperature) + gumbel_from_bits(
            np, bits[candidates]
        )
        return int(candidates[np.argmax(scores)])
    return int(near[best])


def score_margin(
    row: Floats, position: int, sampling: Sampling, candidates: Sequence[int]
) -> float:
    """Return the distance of two candidates' scores in logits: how close they are to a tie.

    Infinite if the filters keep only one of them.
    """
    first, second = candidates
    if is_greedy(sampling):
        return abs(float(row[first]) - float(row[second]))
    if has_filter(sampling):
        allowed = filter_tokens(row, sampling)
        if not {first, second} <= {int(token) for token in allowed}:
            return float("inf")
    ids = np.array([first, second])
    scores = _score(row[ids], ids, position, sampling)
    return abs(float(scores[0]) - float(scores[1])) * sampling.temperature


def has_filter(sampling: Sampling) -> bool:
    """Return True if top-k, top-p or min-p restrict the distribution."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def filter_tokens(row: Floats, sampling: Sampling) -> Ids:
    """Return the ids that the filters keep, in falling order of logit; never empty.

    Ties at the border of top-k are broken by the smaller id, so the result is a function of the
    logits alone.
    """
    top = row.max()
    distance = _NEAR + log(row.size)
    near = np.flatnonzero(row >= top - np.float32(distance))
    total = float(np.exp(row - top).sum(dtype=np.float64))
    if _needs_more(row, near, top, total, sampling):
        near = np.arange(row.size)
    order = near[np.lexsort((near, -row[near]))]
    shares = np.exp(row[order] - top).astype(np.float64) / total
    size = order.size
    if sampling.top_k:
        size = min(size, sampling.top_k)
    if sampling.top_p < 1.0:
        before = np.cumsum(shares) - shares
        size = min(size, int(np.count_nonzero(before < sampling.top_p)))
    if sampling.min_p > 0.0:
        size = min(size, int(np.count_nonzero(shares >= sampling.min_p * shares[0])))
    result: Ids = order[: max(1, size)]
    return result


def _needs_more(row: Floats, near: Ids, top: np.float32, total: float, sampling: Sampling) -> bool:
    """Return True if a filter's border may lie beyond the near tokens."""
    reaches_k = 0 < sampling.top_k <= near.size
    mass = float(np.exp(row[near] - top).sum(dtype=np.float64)) / total
    reaches_p = sampling.top_p < 1.0 and mass >= sampling.top_p
    reaches_min = sampling.min_p > exp(-_NEAR)
    return not (reaches_k or reaches_p or reaches_min)


def score_candidates(
    ids: Ids, logits: Floats, positions: Sequence[int], sampling: Sampling
) -> Floats:
    """Score a drafter's candidates: logits under the target's noise.

    Args:
        ids: [rows, n] candidate ids, in falling order of logit.
        logits: [rows, n] their logits; the filters apply to the distribution of these n alone.
        positions: [rows] the absolute position that the chosen token will have.

    Returns:
        [rows, n] logits / temperature + noise; far lower for filtered tokens. For greedy
        sampling, the logits.
    """
    if is_greedy(sampling):
        return logits
    scores: Floats = logits / np.float32(sampling.temperature)
    scores = scores + gumbel(np, sampling.seed, positions, ids.astype(np.uint32))
    if has_filter(sampling):
        for row in range(ids.shape[0]):
            scores[row, filter_tokens(logits[row], sampling).size :] -= _DROPPED
    return scores
