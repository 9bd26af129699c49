"""AdamW as a pure function, in full precision, and clipping of the gradient."""

import mlx.core as mx

from services.distill.checkpoint import Moments
from services.distill.laws import Weights

_BETAS = (0.9, 0.95)
_EPSILON = 1e-8


def clipped(gradient: Weights, largest: float) -> Weights:
    """The gradient, scaled down if its norm exceeds `largest`."""
    norm = mx.sqrt(mx.stack([mx.square(array).sum() for array in gradient.values()]).sum())
    scale = mx.minimum(1.0, largest / (norm + 1e-6))
    return {name: array * scale for name, array in gradient.items()}


def adamw(
    weights: Weights,
    gradient: Weights,
    moments: Moments,
    *,
    count: mx.array,
    rate: mx.array,
    decay: float,
) -> tuple[Weights, Moments]:
    """One step (Loshchilov, Hutter 2019); `count` is its number, from 1."""
    b1, b2 = _BETAS
    first, second, new = {}, {}, {}
    for name, weight in weights.items():
        g = gradient[name]
        first[name] = b1 * moments.first[name] + (1 - b1) * g
        second[name] = b2 * moments.second[name] + (1 - b2) * mx.square(g)
        mean = first[name] / (1 - mx.power(b1, count))
        spread = mx.sqrt(second[name] / (1 - mx.power(b2, count)))
        new[name] = weight - rate * (mean / (spread + _EPSILON) + decay * weight)
    return new, Moments(first, second)
