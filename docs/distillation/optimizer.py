"""Muon for matrices, Adam for biases and norms; their gradients leave as one vector."""

from collections.abc import Callable

import torch

_BETAS = (0.9, 0.95)


class Optimizer:
    """Both, over parameters in float32.

    Args:
        rate: of the matrices, the spectral norm of a step.
        small_rate: of all others.
    """

    def __init__(self, parameters: list[torch.Tensor], rate: float, small_rate: float) -> None:
        self._all = parameters
        matrices = [one for one in parameters if one.ndim == 2]
        others = [one for one in parameters if one.ndim < 2]
        self._optimizers = (
            (torch.optim.Muon(matrices, weight_decay=0.0), rate),
            (torch.optim.Adam(others, betas=_BETAS), small_rate),
        )

    @torch.no_grad()
    def step(
        self, share: float, mean: Callable[[torch.Tensor], torch.Tensor], spent: float
    ) -> torch.Tensor:
        """Step with `share` of the rates; return the mean of `spent` over all processes."""
        gradients = [one.grad.flatten() for one in self._all if one.grad is not None]
        flat = mean(torch.cat([*gradients, gradients[0].new_tensor([spent])]))
        parts = flat[:-1].split([one.numel() for one in self._all])
        for one, part in zip(self._all, parts, strict=True):
            one.grad = part.view_as(one)
        for optimizer, rate in self._optimizers:
            optimizer.param_groups[0]["lr"] = share * rate
            optimizer.step()
            optimizer.zero_grad()
        return flat[-1].clone()
