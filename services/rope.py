"""RoPE for tokens that stand side by side: each of a flat row at a position of its own."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from protocol.errors import ModelError


class BranchRope(nn.Module):
    """Wraps a layer's RoPE; an array of positions rotates token i by positions[i].

    `mx.fast.rope` takes an array offset along the batch axis, so the tokens become the
    batch for the rotation: bit-equal to rotating them one by one.
    """

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self._rope = rope

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """[1, heads, tokens, size] -> the same, rotated."""
        if isinstance(offset, mx.array):
            rotated: mx.array = self._rope(x.swapaxes(0, 2), offset=offset)
            return rotated.swapaxes(0, 2)
        result: mx.array = self._rope(x, offset=offset)
        return result


def allow_branches(model: nn.Module) -> None:
    """Wrap the RoPE of every attention layer of an mlx-lm model.

    Raises:
        ModelError: the model has no RoPE to wrap, or one whose base depends on the length.
    """
    found = False
    for _, module in model.named_modules():
        rope = getattr(module, "rope", None)
        if isinstance(rope, DynamicNTKScalingRoPE):
            raise ModelError("dynamic NTK RoPE scaling is not supported for drafting")
        if isinstance(rope, nn.Module) and not isinstance(rope, BranchRope):
            module.rope = BranchRope(rope)
            found = True
    if not found:
        raise ModelError("the model has no rotary position embedding, so it cannot draft trees")
