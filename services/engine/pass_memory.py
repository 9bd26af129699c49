"""Memory of a pass, estimated in advance and compared with the free memory.

MLX's CPU backend does not survive a failed allocation, and the kernel kills a process that exceeds
its control group's limit. A pass that would exceed it is refused: its request fails, and the others
continue.
"""

from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from protocol.errors import OutOfMemory
from services.engine.batch import BUCKET, round_to_bucket, round_to_traced
from services.kernels.cpu.decoder import kernel_of
from services.kernels.cuda.attention import MOST_ROWS, count_parts, round_rows
from services.kernels.register import kernels
from services.kv.budget import KVSize
from services.mlx.free_memory import allocate_returnably, free_for_mlx, give_back

_RESERVE = 128 << 20
"""Memory allocated by libraries: MKL's buffers, threads' stacks and heaps."""
_FEW_ROWS = 64
"""A pass of at most this many tokens that needs no new buffers is not estimated."""
_FEW_BYTES = 32 << 20
"""Nor are states of at most this many bytes."""
_MORE_ROWS = 8
"""Rows for which a recurrent layer holds states while others are being computed."""
_MORE_ROWS_ON_CUDA = 64
"""The same where they are held until the kernels of a graph have finished."""
_AT_ONCE = 3
"""Layers whose arrays are alive at the same time: MLX works ahead of evaluation."""
_CUDA_ARRAYS = 4
"""Factor on CUDA for the output of all layers' matrices.

MLX keeps a kernel's inputs until the kernels of its graph are done, graphs are queued, and products
have workspaces. On an H100 it was 3.4 to 4.3 times with three layers, 1.6 to 1.9 with thirty.
"""
_CUDA_ROUNDING = 1 << 20
"""Per layer's arrays on CUDA: each takes whole pieces of 16 kB."""
_BYTES = 4
_MOST_EXPERTS = 8
"""Most experts chosen by one token."""
_MB = 1e6


class Held(Protocol):
    """The memory figures of a state."""

    @property
    def length(self) -> int:
        """Number of tokens that it holds."""
        ...


class PassMemory:
    """Estimates the memory of one model's passes.

    Args:
        model: an mlx-lm model.
        kv: size of a sequence's state.
        release: frees something from a cache; False if nothing is left.
        logits: True if the rows' logits are computed, and drafts among them may be rejected.
    """

    def __init__(
        self, model: Any, kv: KVSize, release: Callable[[], bool], *, logits: bool
    ) -> None:
        allocate_returnably()
        self._kv, self._rejects = kv, logits
        self._release = release
        self._layers = max(1, len(model.layers))
        self._row_bytes = _count_row(model)
        if logits:
            self._row_bytes += _AT_ONCE * _BYTES * _count_head(model)
        served, holds = kernels().on_gpu or kernel_of(model) is not None, kernels().holds_arrays
        self._held_per_row = kv.passes.held_per_row if holds else 0
        self._rounding = self._layers * _CUDA_ROUNDING if holds else 0
        self._more_rows = _MORE_ROWS_ON_CUDA if holds else _MORE_ROWS
        self._count_slots = _round_to_largest if holds else round_to_bucket
        self._part_bytes = self._layers * _BYTES * _count_queries(model) if holds else 0
        per_row = kv.passes.per_row or self._held_per_row
        self._is_light = not (kv.passes.states or per_row or self._part_bytes)
        """True if a pass over few tokens needs nothing but room for them."""
        self._score_bytes = 0 if served else 2 * _BYTES * _count_heads(model)

    def fit(self, state: Held, rows: int, least: int) -> int:
        """Return the most tokens of a pass that fits: at most `rows`, at least `least`.

        Raises:
            OutOfMemory: not even a pass of `least` tokens fits.
        """
        while rows > least and not self._fits(self._count_bytes([(state, rows)])):
            rows = max(least, rows // 2)
        self.check([(state, rows)])
        return rows

    def check(self, asked: Sequence[tuple[Held, int]]) -> None:
        """Raise OutOfMemory if one pass over these numbers of new tokens does not fit."""
        rows, may_grow = 0, False
        for state, count in asked:
            rows += count
            may_grow |= (state.length - 1) // BUCKET < (state.length + count - 1) // BUCKET
        if rows <= _FEW_ROWS and not (may_grow and any(starmap(self._count_growth, asked))):
            if self._is_light:
                return
            scratch = sum(self._count_states(count) for _, count in asked)
            scratch += self._count_parts(asked)
            # MLX's cache includes the arrays of the last pass over as many tokens.
            if scratch <= max(_FEW_BYTES, mx.get_cache_memory()):
                return
        needed = self._count_bytes(asked)
        if not self._fits(needed):
            raise _refuse(f"a pass over {rows} tokens", needed)

    def check_prompt(self, held: int, tokens: int) -> None:
        """Raise OutOfMemory if a prompt of `tokens` tokens, `held` of them held, does not fit."""
        # A checkpoint at its end copies everything that is not in slots.
        needed = self._count_slots(tokens) * self._kv.per_token + 2 * self._kv.fixed + _RESERVE
        if held < tokens and not self._fits(needed):
            raise _refuse(f"a prompt of {tokens} tokens", needed)

    def _fits(self, needed: int) -> bool:
        """Return True if that much memory is left, dropping cached states if necessary."""
        if needed <= free_for_mlx().bytes:
            return True
        give_back()
        while needed > free_for_mlx().bytes:
            if not self._release():
                return False
            give_back()
        return True

    def _count_growth(self, state: Held, rows: int) -> int:
        """Return the bytes added to the state; a checkpoint may hold the old buffers."""
        slots = self._count_slots(state.length + rows) - self._count_slots(state.length)
        anew = not state.length or rows > _FEW_ROWS
        return slots * self._kv.per_token + (self._kv.fixed if anew else 0)

    def _count_states(self, rows: int) -> int:
        """Return the bytes that a pass over `rows` tokens needs for recurrent states."""
        size = self._kv.passes
        kept = rows if self._rejects and rows <= size.most_kept else 0
        own, held = size.per_row * (rows + self._more_rows), self._held_per_row * rows
        return size.states * (1 + kept) + max(own, held)

    def _count_parts(self, asked: Sequence[tuple[Held, int]]) -> int:
        """Return the bytes of a long attention's partial results over all layers."""
        if not self._part_bytes:
            return 0
        rows, is_shared = sum(rows for _, rows in asked), len(asked) > 1
        longest = max(self._count_slots(state.length + rows) for state, rows in asked)
        parts = count_parts(longest)
        # Longer shared passes use MLX's attention, or texts with few parts.
        if parts < 2 or rows > (_FEW_ROWS if is_shared else MOST_ROWS):
            return 0
        return parts * (round_rows(rows) if is_shared else rows) * self._part_bytes

    def _count_bytes(self, asked: Sequence[tuple[Held, int]]) -> int:
        total = _RESERVE + self._rounding
        for state, rows in asked:
            slots = self._count_slots(state.length + rows)
            # A buffer that grows is copied, one layer after the other.
            total += self._count_growth(state, rows) + slots * self._kv.per_token // self._layers
            total += rows * (self._row_bytes + slots * (self._score_bytes + 1))
            total += self._count_states(rows)
        return total + self._count_parts(asked)


def _refuse(what: str, needed: int) -> OutOfMemory:
    free = free_for_mlx()
    return OutOfMemory(
        f"{what} needs {needed / _MB:,.0f} MB of memory, and {free.limit} leaves "
        f"{free.bytes / _MB:,.0f} MB"
    )


def _count_row(model: Any) -> int:
    """Return the bytes that the layers need for one token of a pass."""
    outputs = list(map(_count_outputs, model.layers))
    if not kernels().holds_arrays:
        return _AT_ONCE * _BYTES * max(outputs, default=0)
    sizes = [a.itemsize for _, a in _weights(model) if mx.issubdtype(a.dtype, mx.floating)]
    return _CUDA_ARRAYS * max(sizes, default=_BYTES) * sum(outputs)


def _count_outputs(layer: nn.Module) -> int:
    """Return the numbers that a layer computes for one token, in its chosen experts only."""
    total = 0
    for name, array in _weights(layer):
        if name.endswith("weight") and array.ndim == 2:  # a matrix
            total += array.shape[0]
        elif name.endswith("weight") and array.ndim > 2:  # of experts
            total += min(array.shape[0], _MOST_EXPERTS) * array.shape[1]
    return total


def _count_head(model: Any) -> int:
    """Return the numbers that the head computes for one token."""
    return max((array.shape[0] for _, array in _weights(model) if array.ndim == 2), default=0)


def _count_heads(model: Any) -> int:
    """Return the attention heads of a layer; many if its layers do not say."""
    counts = [
        count
        for _, module in model.named_modules()
        for name in ("n_heads", "num_heads", "num_attention_heads")
        if isinstance(count := getattr(module, name, None), int)
    ]
    return max(counts, default=64)


def _count_queries(model: Any) -> int:
    """Return the numbers of a token's queries in a layer, and a maximum and a sum per head."""
    widths = [
        array.shape[0]
        for layer in model.layers
        for name, array in _weights(layer)
        if name.endswith("weight") and {"q_proj", "qkv_proj"} & set(name.split("."))
    ]
    return max(widths, default=0) + 2 * _count_heads(model)


def _weights(module: nn.Module) -> list[tuple[str, mx.array]]:
    parameters: list[tuple[str, mx.array]] = tree_flatten(module.parameters())  # type: ignore[assignment]
    return parameters


def _round_to_largest(slots: int) -> int:
    """Return the largest buffer, in slots, for this many, replayed or not."""
    return round_to_traced(slots) or round_to_bucket(slots)
