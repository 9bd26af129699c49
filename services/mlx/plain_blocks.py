"""The mlx-lm decoder blocks that our kernels may compute, and how kernels are attached."""

import functools
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from services.mlx.patches import Patch, patches_of

FAMILIES = ("llama", "qwen2", "qwen3")
"""Modules of mlx-lm whose `TransformerBlock` is x + attention(norm(x)), then x + MLP(norm(x))."""


class Unfit(Exception):
    """The block is of a kind that the kernels do not compute."""


class Kernels(Protocol):
    """Computes some passes of a block."""

    def takes(self, x: mx.array, cache: Any) -> bool:
        """Return True if a pass over these rows [batch, n, width] is one of them."""
        ...

    def run(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """Return the output of the block for [1, n, width]."""
        ...


def is_plain_block(block: Any) -> bool:
    """Return True if this module is an unmodified block of one of the families."""
    parts = (block, getattr(block, "self_attn", None), getattr(block, "mlp", None))
    homes = {f"mlx_lm.models.{family}" for family in FAMILIES}
    modules = {type(part).__module__ for part in parts}
    names = tuple(type(part).__qualname__ for part in parts)
    return (
        names == ("TransformerBlock", "Attention", "MLP") and len(modules) == 1 and modules <= homes
    )


def route_through(block: Any, kernels: Kernels) -> Patch:
    """Route the passes that these kernels take through them; all others stay MLX's."""
    return Patch(block, with_kernels, {"kernels": kernels})


def find_kernels(model: Any) -> list[Kernels]:
    """Return the kernels attached to all blocks of a model; empty if one of them has none."""
    if not isinstance(model, nn.Module):
        return []
    blocks = [block for _, block in model.named_modules() if hasattr(block, "self_attn")]
    if not all(any(patch.change is with_kernels for patch in patches_of(one)) for one in blocks):
        return []
    return [block.kernels for block in blocks]


@functools.cache
def with_kernels(plain: type) -> type:
    """Derive the class of blocks with kernels."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        kernels: Kernels = self.kernels
        if kernels.takes(x, cache):
            return kernels.run(x, mask, cache)
        by_mlx: mx.array = plain.__call__(self, x, mask, cache)
        return by_mlx

    return type(f"{plain.__name__}WithKernels", (plain,), {"__call__": call})
