"""MLX's affine 4 bits in groups of 32, in PyTorch."""

import torch

_GROUP = 32
_EPSILON = 1e-7


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [outputs, groups, 32], scales and biases [outputs, groups, 1] in half precision."""
    groups = weight.float().unflatten(-1, (-1, _GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=_EPSILON)
    is_low = low.abs() > high.abs()
    scale = torch.where(is_low, scale, -scale)
    edge = torch.where(is_low, low, high)
    steps = (edge / scale).round()
    is_zero = steps == 0
    scale = torch.where(is_zero, scale, edge / torch.where(is_zero, 1.0, steps)).half().float()
    bias = torch.where(is_zero, 0.0, edge).half().float()
    safe = torch.where(scale == 0, _EPSILON, scale)
    return ((groups - bias) / safe).round().clamp(0, 15), scale, bias


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return what the weight is in 4 bits; gradients pass through."""
    with torch.no_grad():
        codes, scale, bias = quantise(weight)
        change = (codes * scale + bias).flatten(-2).to(weight.dtype) - weight
    return weight + change


def packed(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a layer's tensors as MLX stores them; `name` ends with `.weight`."""
    codes, scale, bias = quantise(weight)
    pairs = codes.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2))
    words = (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.uint32)
    layer = name.removesuffix(".weight")
    return {
        name: words,
        f"{layer}.scales": scale.squeeze(-1).half(),
        f"{layer}.biases": bias.squeeze(-1).half(),
    }
