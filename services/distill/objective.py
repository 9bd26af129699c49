"""Training objectives, given both distributions at a position.

`p` is the target's distribution over the tokens in the drafter's head; the mass that a trimmed head
cannot reach is missing from its sum, so every measure of acceptance includes it. `q` is the
drafter's distribution and sums to 1.
"""

from collections.abc import Callable

import mlx.core as mx

from protocol.settings import Objective

Loss = Callable[[mx.array, mx.array], mx.array]
"""(p [count, head], logits of q [count, head]) -> loss [count]."""

_SHARPER = 0.25
"""Temperature of the target's distribution in `rank`: nearly its order, but ties still share."""


def overlap(p: mx.array, q: mx.array) -> mx.array:
    """Return [count] sums of min(p, q): acceptance under the rejection rule, 1 - TV."""
    return mx.minimum(p, q).sum(axis=-1)


def acceptance_bound(p: mx.array, q: mx.array) -> mx.array:
    """Return [count] (1 - TV) / (1 + TV), a bound of coupled acceptance (Daliri et al.)."""
    common = overlap(p, q)
    return common / (2.0 - common)


def cross_entropy(p: mx.array, logits: mx.array) -> mx.array:
    """Return [count] cross-entropy; a position weighs as much as the head can reach of it."""
    return p.sum(axis=-1) * mx.logsumexp(logits, axis=-1) - (p * logits).sum(axis=-1)


def total_variation(p: mx.array, logits: mx.array) -> mx.array:
    """Return [count] rejections per token under the rejection rule."""
    return 1.0 - overlap(p, mx.softmax(logits, axis=-1))


def rejection_bound(p: mx.array, logits: mx.array) -> mx.array:
    """Return [count] maximum rejections per token under the coupled rule.

    It is steeper than total variation where the two nearly agree, flatter where they do not: it
    gives up positions that a small drafter cannot learn.
    """
    return 1.0 - acceptance_bound(p, mx.softmax(logits, axis=-1))


def rank(p: mx.array, logits: mx.array) -> mx.array:
    """Return [count] cross-entropy with the sharpened target, for greedy acceptance and hits."""
    sharp = mx.power(mx.maximum(p, 1e-12), 1.0 / _SHARPER)
    total = sharp.sum(axis=-1, keepdims=True)
    # The sharpened distribution keeps the reachable mass, as in `cross_entropy`.
    return cross_entropy(sharp / total * p.sum(axis=-1, keepdims=True), logits)


LOSSES: dict[Objective, Loss] = {
    "ce": cross_entropy,
    "tv": total_variation,
    "coupled": rejection_bound,
    "rank": rank,
}
