"""AdamW and clipping, MLX's own, as pure functions of everything that a checkpoint holds."""

from typing import Any

import mlx.core as mx
import mlx.optimizers as optimizers

from services.distill.checkpoint import Moments
from services.distill.logits import Weights

_BETAS = (0.9, 0.95)


def clipped(gradient: Weights, largest: float) -> Weights:
    """The gradient, scaled down if its norm exceeds `largest`."""
    mlx: Any = optimizers  # its clipping has no types
    scaled: Weights = mlx.clip_grad_norm(gradient, largest)[0]
    return scaled


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
    optimizer = optimizers.AdamW(0.0, betas=list(_BETAS), weight_decay=decay, bias_correction=True)
    optimizer.state["step"], optimizer.state["learning_rate"] = count, rate
    first, second, new = {}, {}, {}
    for name, weight in weights.items():
        state = {"m": moments.first[name], "v": moments.second[name]}
        new[name] = optimizer.apply_single(gradient[name], weight, state)
        first[name], second[name] = state["m"], state["v"]
    return new, Moments(first, second)
