"""Muon (Jordan et al. 2024) for matrices, Adam for biases and norms; gradients as one vector."""

import math
from collections.abc import Callable

import torch

_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: from the publication."""
_ITERATIONS = 5


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return [count, rows, columns] with all singular values near 1."""
    a, b, c = _COEFFICIENTS
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if is_tall else x).float()


class Optimizer:
    """Both, over parameters in float32.

    Args:
        rate: of the matrices, the spectral norm of a step.
        small_rate: of all others.
    """

    def __init__(self, parameters: list[torch.Tensor], rate: float, small_rate: float) -> None:
        self._all = parameters
        self._rate, self._small_rate = rate, small_rate
        self._matrices: dict[torch.Size, list[torch.Tensor]] = {}
        for one in parameters:
            if one.ndim == 2:
                self._matrices.setdefault(one.shape, []).append(one)
        self._momentum = {s: torch.zeros_like(torch.stack(m)) for s, m in self._matrices.items()}
        self._small = [one for one in parameters if one.ndim < 2]
        self._adam = torch.optim.Adam(self._small, lr=small_rate, betas=_BETAS)

    @torch.no_grad()
    def step(
        self, share: float, mean: Callable[[torch.Tensor], torch.Tensor], spent: float
    ) -> torch.Tensor:
        """Step with `share` of the rates; return the mean of `spent` over all processes."""
        gradients = [one.grad.flatten() for one in self._all if one.grad is not None]
        flat = mean(torch.cat([*gradients, gradients[0].new_tensor([spent])]))
        at = 0
        for one in self._all:
            one.grad = flat[at : at + one.numel()].view_as(one)
            at += one.numel()
        for shape, matrices in self._matrices.items():
            gradient = torch.stack([one.grad for one in matrices if one.grad is not None])
            momentum = self._momentum[shape].lerp_(gradient, 1 - _MOMENTUM)
            moved = orthogonal(gradient.lerp(momentum, _MOMENTUM))
            rate = share * self._rate * math.sqrt(max(1.0, shape[0] / shape[1]))
            for one, change in zip(matrices, moved, strict=True):
                one.sub_(change, alpha=rate)
        self._adam.param_groups[0]["lr"] = share * self._small_rate
        self._adam.step()
        for one in self._all:
            one.grad = None
        return flat[-1].clone()
