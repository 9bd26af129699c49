"""Training objectives, given both distributions at a position.

`p` is the target's distribution over the tokens in the drafter's head; the mass that a trimmed head
cannot reach is missing from its sum, so every measure of acceptance includes it. `q` is the
drafter's distribution and sums to 1.
"""

from collections.abc import Callable
from typing import Literal

import mlx.core as mx

Objective = Literal["ce", "tv"]
Loss = Callable[[mx.array, mx.array], mx.array]
"""(p [count, head], logits of q [count, head]) -> loss [count]."""


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


LOSSES: dict[Objective, Loss] = {"ce": cross_entropy, "tv": total_variation}
