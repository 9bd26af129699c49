"""The functions of `kernels.py` in PyTorch, for devices without Triton; not in a CUDA graph."""

import torch
import torch.nn.functional as fn

Pair = tuple[torch.Tensor, torch.Tensor]


def rotate(
    qkv: torch.Tensor, turns: Pair, place: torch.Tensor, kept: Pair, heads: int
) -> torch.Tensor:
    """[rows, heads, size] queries; keys and values are written at `place` of each row."""
    rows, kv_heads, _, size = kept[0].shape
    q, k, v = qkv.view(rows, -1, size).split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = (turn[place][:, None] for turn in turns)
    row = torch.arange(rows, device=qkv.device)
    kept[0][row, :, place] = turn(k, cos, sin)
    kept[1][row, :, place] = v
    return turn(q, cos, sin)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [..., size], its halves together, by angles [..., half]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def attend(queries: torch.Tensor, kept: Pair, place: torch.Tensor) -> torch.Tensor:
    """[rows, heads, size]: each row's queries over its keys up to `place`."""
    used = int(place.max()) + 1
    group = queries.shape[1] // kept[0].shape[1]
    k, v = (part[:, :, :used].repeat_interleave(group, dim=1) for part in kept)
    mask = torch.arange(used, device=place.device) <= place[:, None]
    return fn.scaled_dot_product_attention(
        queries[:, :, None], k, v, attn_mask=mask[:, None, None]
    )[:, :, 0]


def choose(logits: torch.Tensor, heat: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """[rows] int64, samples at temperatures `heat`."""
    torch.manual_seed(int(seed))
    noise = -torch.empty_like(logits, dtype=torch.float32).exponential_().log()
    return (logits.float() + heat[:, None] * noise).argmax(dim=-1)
