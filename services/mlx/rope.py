"""RoPE for tokens of a flat row, each at its own position.

`allow_branches` wraps the RoPE of every attention layer so that it also takes an array of
positions. `use_tables` does so too and, for MLX's CPU backend, which computes sines and cosines
anew for every layer, shares them among all layers of a forward pass.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.rope_utils import (
    DynamicNTKScalingRoPE,
    Llama3RoPE,
    SuScaledRoPE,
    YarnRoPE,
)

from protocol.errors import ModelError

Offset = int | mx.array
"""Position of the first token of a chain, or [tokens] the position of each."""


def _is_row(offset: Offset) -> bool:
    """Return True if there is a position per token; some models wrap a single one into an array."""
    return isinstance(offset, mx.array) and offset.ndim > 0


def _is_same(offset: Offset, other: Offset | None) -> bool:
    if isinstance(offset, mx.array) or isinstance(other, mx.array):
        return offset is other  # a frame's array is created once and only passed on
    return offset == other


class BranchRope(nn.Module):
    """Wraps a layer's RoPE; an array of positions rotates token i by positions[i].

    `mx.fast.rope` takes an array offset along the batch axis, so the tokens become the
    batch for the rotation: bit-equal to rotating them one by one.
    """

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self._rope = rope

    @property
    def own(self) -> Any:
        """The layer's original RoPE."""
        return self._rope

    def __call__(self, x: mx.array, offset: Offset = 0, **options: Any) -> mx.array:
        """Rotate [1, heads, tokens, size]; the options are the RoPE's own."""
        if _is_row(offset) and x.shape[2] == 1:
            # A batch of branches, one token each: mlx's own meaning of several positions.
            alone: mx.array = self._rope(x, offset=offset, **options)
            return alone
        if _is_row(offset):
            rotated: mx.array = self._rope(x.swapaxes(0, 2), offset=offset, **options)
            return rotated.swapaxes(0, 2)
        result: mx.array = self._rope(x, offset=offset, **options)
        return result


_STEADY = (nn.RoPE, Llama3RoPE, SuScaledRoPE, YarnRoPE)
"""Kinds whose angles depend only on the position."""
_FEWEST_POSITIONS = 1024


class Tables:
    """cos and sin of the latest frame, [tokens, size], shared by layers of equal RoPE.

    They are read off the layer's own RoPE, applied to a unit vector, so that every scaling
    rule is right by construction.
    """

    def __init__(self, rope: BranchRope, dims: int) -> None:
        self.rope = rope
        self._dims = dims
        self._offset: Offset | None = None
        self._tables: tuple[mx.array, mx.array] | None = None

    def at(self, offset: Offset, tokens: int, size: int) -> tuple[mx.array, mx.array]:
        """Return the tables for these positions; the sine includes the sign of its target half."""
        if (
            self._tables is None
            or not _is_same(offset, self._offset)
            or len(self._tables[0]) != tokens
        ):
            self._offset, self._tables = offset, self._compute(offset, tokens, size)
        return self._tables

    def angles(self, count: int) -> list[npt.NDArray[np.float32]]:
        """Return cos and sin of `count` positions or more, [any, dims / 2], for use outside MLX."""
        rounded = max(_FEWEST_POSITIONS, 1 << (count - 1).bit_length())
        cos, sin = self._compute(0, rounded, self._dims)
        half = self._dims // 2
        return [np.array(cos[:, :half]), np.array(sin[:, half:])]

    @property
    def are_steady(self) -> bool:
        """True if a position's angles are the same in every pass."""
        return type(self.rope.own) in _STEADY

    def _compute(self, offset: Offset, tokens: int, size: int) -> tuple[mx.array, mx.array]:
        half, rest = self._dims // 2, size - self._dims
        unit = mx.concatenate([mx.ones(half), mx.zeros(half), mx.ones(rest)])
        turned = self.rope(mx.broadcast_to(unit, (1, 1, tokens, size)), offset)[0, 0]
        cos, sin = turned[:, :half], turned[:, half : self._dims]
        plain = turned[:, self._dims :]
        return (
            mx.concatenate([cos, cos, plain], axis=-1),
            mx.concatenate([-sin, sin, mx.zeros_like(plain)], axis=-1),
        )


class TableRope(nn.Module):
    """Rotates by shared tables; half-split layout only."""

    def __init__(self, tables: Tables, dims: int) -> None:
        super().__init__()
        self._tables = tables
        self._dims = dims

    @property
    def tables(self) -> Tables:
        """The shared tables."""
        return self._tables

    @property
    def dims(self) -> int:
        """Rotated elements of a head."""
        return self._dims

    def __call__(self, x: mx.array, offset: Offset = 0, **options: Any) -> mx.array:
        """Rotate like `BranchRope`; calls with options do not use the tables."""
        if options:
            return self._tables.rope(x, offset, **options)
        in_batch = _is_row(offset) and x.shape[0] > 1
        cos, sin = self._tables.at(offset, x.shape[0 if in_batch else -2], x.shape[-1])
        if in_batch:
            cos, sin = cos[:, None, None], sin[:, None, None]
        half, dims = self._dims // 2, self._dims
        parts = [x[..., half:dims], x[..., :half]]
        if dims < x.shape[-1]:
            parts.append(x[..., dims:])
        return x * cos + mx.concatenate(parts, axis=-1) * sin


def is_steady(rope: Any) -> bool:
    """Return True if tables by position cover all of a layer's RoPE, or it has none."""
    own = rope.own if isinstance(rope, BranchRope) else rope
    if isinstance(own, TableRope):
        return own.tables.are_steady
    return type(own).__name__ == "NoPE" or (type(own) in _STEADY and not _is_interleaved(own))


def _is_interleaved(rope: Any) -> bool:
    return not isinstance(rope, SuScaledRoPE) and bool(getattr(rope, "traditional", True))


def _attentions(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield every module of the model that has a RoPE, with it."""
    for _, module in model.named_modules():
        rope = getattr(module, "rope", None)
        if isinstance(rope, nn.Module):
            yield module, rope


def has_rope(model: nn.Module) -> bool:
    """Return True if any layer of the model has a RoPE."""
    return next(_attentions(model), None) is not None


def allow_branches(model: nn.Module) -> None:
    """Wrap the RoPE of every attention layer of an mlx-lm model.

    Raises:
        ModelError: the model has no RoPE to wrap, or one whose base depends on the length.
    """
    attentions = list(_attentions(model))
    if not attentions:
        raise ModelError("the model has no rotary position embedding, so it cannot draft trees")
    for attention, rope in attentions:
        if isinstance(rope, DynamicNTKScalingRoPE):
            raise ModelError("dynamic NTK RoPE scaling is not supported for drafting")
        if not isinstance(rope, BranchRope | TableRope):
            attention.rope = BranchRope(rope)


def use_tables(model: nn.Module) -> None:
    """Let all layers of equal RoPE share their sines and cosines; for MLX's CPU backend."""
    shared: dict[bytes, Tables] = {}
    for attention, rope in _attentions(model):
        dims = rope.dim if isinstance(rope, SuScaledRoPE) else getattr(rope, "dims", None)
        if dims is None or _is_interleaved(rope):
            continue
        if isinstance(rope, DynamicNTKScalingRoPE):
            continue
        probe: Any = rope(mx.ones((1, 1, 2, dims)), offset=1000)
        tables = shared.setdefault(np.array(probe).tobytes(), Tables(BranchRope(rope), dims))
        attention.rope = TableRope(tables, dims)
