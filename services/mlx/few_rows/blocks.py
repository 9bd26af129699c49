"""Decoder blocks on MLX's CPU backend by kernels of our own (`cpu/block.c`), for few rows.

For a small model MLX spends as much time on norms, gates, rotations and the building of its
graph as on the products. A block here is two calls, before and after its attention; keys and
values still go through its cache. Which blocks: those of the classes below whose parts are
plain, tried against MLX's own computation when a model is prepared. More rows, training and
traced passes stay MLX's.
"""

import ctypes
import logging
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from services.kv.cache import KVStore
from services.kv.packed import PackedKV
from services.kv.slots import KnownRows
from services.mlx.array_memory import address, view
from services.mlx.blas import cpu_kernels
from services.mlx.few_rows.attention import AttentionCall, Rows, attend_rows
from services.mlx.few_rows.weights import LINEARS, NORMS, BlockWeights, HeldWeights, Unfit
from services.mlx.launching import launch
from services.mlx.plain_blocks import give_kernels, is_plain_block
from services.mlx.rope import BranchRope, TableRope, Tables

_log = logging.getLogger(__name__)

MOST_ROWS = 16
"""As many as `small_gemm` computes with the same bits in any company (`services.mlx.blas`)."""
_LANES, _WIDEST = 8, 256
"""Of attention: a head's size is a multiple of the one and at most the other."""
_TOLERANCE = 1e-4
"""Relative, of what a block adds to its input."""
_BEFORE = 20
"""Tokens before those of the trial."""


class _Shape(NamedTuple):
    """What decides how a block is computed, beside its weights; blocks of one shape are alike."""

    family: type
    width: int
    heads: int
    kv_heads: int
    size: int
    hidden: int
    scale: float
    eps: tuple[float, ...]
    biases: tuple[bool, ...]
    tables: Tables | None


class BlockKernel:
    """One block as the kernels see it.

    Raises:
        Unfit: it is of another kind.
    """

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self._weights = held = HeldWeights()
        norms = [
            held.norm(owner, name)
            for owner, name in (
                (block, "input_layernorm"),
                (attention, "q_norm"),
                (attention, "k_norm"),
                (block, "post_attention_layernorm"),
            )
        ]
        layers = [getattr(attention, f"{name}_proj") for name in "qkvo"]
        layers += [getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")]
        linears = [held.linear(layer) for layer in layers]
        rows = {name: linear.outputs for name, linear in zip(LINEARS, linears, strict=True)}
        heads, kv_heads = attention.n_heads, attention.n_kv_heads
        size = rows["q"] // heads
        self._tables, rotated = _rotation(attention.rope)
        if size % _LANES or size > _WIDEST or rows["k"] != kv_heads * size:
            raise Unfit(f"heads of {size}")
        self.shape = _Shape(
            type(block), rows["o"], heads, kv_heads, size, rows["gate"], attention.scale,
            tuple(norm.eps for norm in norms), tuple(bool(one.bias) for one in linears),
            self._tables,
        )  # fmt: skip
        parts = dict(zip((*NORMS, *LINEARS), (*norms, *linears), strict=True))
        self.block = BlockWeights(**parts, size=size, rotated=rotated)
        self._address = ctypes.byref(self.block)
        self.is_last = False
        """Whether no block of the model comes after it that is computed so."""

    def takes(self, x: mx.array, cache: Any) -> bool:
        """Whether a pass over these rows is ours."""
        batch, count, _ = x.shape
        return (
            batch == 1
            and count <= MOST_ROWS
            and x.dtype == mx.float32
            and cache is not None
            and not hasattr(cache, "bits")
            and not hasattr(cache, "is_traced")
            and mx.default_device() == mx.cpu
            and np.size(cache.offset) in (1, count)
        )

    def run(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """What the block makes of [1, n, width]."""
        mx.eval(x)
        rows = view(x)
        if not rows.flags.c_contiguous:
            rows = np.ascontiguousarray(rows)
        count = x.shape[1]
        angles = None if self._tables is None else self._tables.angles(cache.offset, count)
        turns = [None] * 3 if angles is None else [address(array) for array in angles]
        keys, values = np.empty((2, 1, self.shape.kv_heads, count, self.shape.size), np.float32)
        known = getattr(cache, "known", None)
        found = None if known is None else self._run_at_once(rows, mask, known, turns, keys, values)
        if found is None:
            return mx.array(self._run_in_steps(rows, mask, cache, turns, keys, values))
        cache.store(mx.array(keys), mx.array(values))
        if self.is_last:
            # What the layers have stored is nobody's input in this pass.
            launch([array for store in cache.stores for array in store.arrays])
        return mx.array(found)

    def _run_at_once(  # noqa: PLR0917
        self, x: Rows, mask: Any, known: Sequence[KnownRows], turns: Any, keys: Rows, values: Rows
    ) -> Rows | None:
        """The block, with its own keys and values; None if there is a mask of another kind."""
        masks = mask.values if isinstance(mask, PackedKV) else [mask]
        calls, held = (AttentionCall * len(known))(), list[Any]()
        for call, rows, own in zip(calls, known, masks, strict=True):
            if not self._describe(call, rows, own, held):
                return None
        out = np.empty_like(x)
        kernels: Any = cpu_kernels()
        kernels.cpu_block(
            self._address, x.shape[1], *turns, address(x), len(known), calls,
            address(keys), address(values), address(out),
        )  # fmt: skip
        return out

    def _describe(self, call: AttentionCall, rows: KnownRows, mask: Any, held: list[Any]) -> bool:
        """Fill in one sequence's attention; whether it is of a kind that the kernels compute."""
        shape, slots = self.shape, rows.start + rows.new
        if isinstance(mask, mx.array):
            if mask.dtype != mx.bool_ or mask.shape != (rows.new, slots):
                return False
            mx.eval(mask)
            seen = view(mask)
            if seen.strides[1] != 1:
                return False
            held.append(seen)
            call.mask, call.mask_row = address(seen), seen.strides[0]
        elif mask not in {None, "causal"}:
            return False
        if rows.start:
            if rows.keys is None or rows.values is None:
                return False
            mx.eval(rows.keys, rows.values)
            keys, values = view(rows.keys), view(rows.values)
            if keys.dtype != np.float32 or keys.strides[3] != 4 or values.strides[3] != 4:
                return False
            held += (keys, values)
            call.k, call.v = address(keys), address(values)
            _, call.k_head, call.k_row, _ = (stride // 4 for stride in keys.strides)
            _, call.v_head, call.v_row, _ = (stride // 4 for stride in values.strides)
        call.heads, call.kv_heads, call.size = shape.heads, shape.kv_heads, shape.size
        call.queries, call.slots, call.old = rows.new, slots, rows.start
        call.causal, call.scale = isinstance(mask, str), shape.scale
        return True

    def _run_in_steps(  # noqa: PLR0917
        self, x: Rows, mask: Any, cache: Any, turns: Any, keys: Rows, values: Rows
    ) -> Rows:
        """The same where the cache says itself which keys and values the rows see."""
        kernels: Any = cpu_kernels()
        shape, count = self.shape, x.shape[1]
        queries = np.empty((count, shape.heads, shape.size), np.float32)
        kernels.cpu_block_begin(
            self._address, count, *turns, *map(address, (x, queries, keys, values))
        )
        all_keys, all_values = cache.update_and_fetch(mx.array(keys), mx.array(values))
        attended = attend_rows(queries, all_keys, all_values, shape.scale, mask)
        if attended is None:
            attended = self._attend_by_mlx(queries, all_keys, all_values, cache, mask)
        out = np.empty_like(x)
        kernels.cpu_block_end(self._address, count, *map(address, (x, attended, out)))
        return out

    def _attend_by_mlx(self, queries: Any, keys: Any, values: Any, cache: Any, mask: Any) -> Rows:
        """What the block's own attention function makes of queries [n, heads, size]."""
        attention = sys.modules[self.shape.family.__module__].scaled_dot_product_attention
        found: mx.array = attention(
            mx.array(queries)[None].swapaxes(1, 2),
            keys, values, cache=cache, scale=self.shape.scale, mask=mask,
        )  # fmt: skip
        return np.array(mx.contiguous(found[0].swapaxes(0, 1)))


def _rotation(rope: Any) -> tuple[Tables | None, int]:
    """The tables that a layer's RoPE rotates by, and how much of a head."""
    if isinstance(rope, BranchRope):
        rope = rope.own
    if type(rope).__name__ == "NoPE":
        return None, 0
    if not isinstance(rope, TableRope) or not rope.tables.are_steady:
        raise Unfit(f"its RoPE is a {type(rope).__name__}")
    return rope.tables, rope.dims


def use_blocks(model: nn.Module) -> int:
    """Let few rows go through our kernels in every block that is of their kind.

    After `use_tables`. The weights must stay where they are.

    Returns:
        How many blocks go through them; 0 without our CPU kernels.
    """
    if cpu_kernels() is None:
        return 0
    tried: dict[_Shape, bool] = {}
    used = list[BlockKernel]()
    for _, block in model.named_modules():
        if not is_plain_block(block):
            continue
        try:
            kernel = BlockKernel(block)
        except Unfit as reason:
            _log.info("blocks by MLX: %s", reason)
            continue
        if kernel.shape not in tried:
            tried[kernel.shape] = _works(block, kernel)
        if tried[kernel.shape]:
            give_kernels(block, kernel)
            used.append(kernel)
    if used:
        used[-1].is_last = True
    return len(used)


def _works(block: Any, kernel: BlockKernel) -> bool:
    """Whether the kernels give what MLX gives, and each row the same bits in any company."""
    width = kernel.shape.width
    before = mx.random.normal((1, _BEFORE, width), key=mx.random.key(0))
    rows = mx.random.normal((1, MOST_ROWS, width), key=mx.random.key(1))

    def read_before() -> KVStore:
        store = KVStore([None], bucketed=False)
        store.chain(_BEFORE)
        mx.eval(block(before, "causal", store.caches[0]))
        return store

    def run(compute: Any, store: KVStore, part: mx.array) -> mx.array:
        store.chain(part.shape[1])
        out: mx.array = compute(part, "causal", store.caches[0])
        mx.eval(out)
        return out

    def run_in(size: int) -> mx.array:
        store = read_before()
        return mx.concatenate(
            [run(kernel.run, store, rows[:, at : at + size]) for at in range(0, MOST_ROWS, size)],
            axis=1,
        )

    found = run_in(MOST_ROWS)
    expected = run(block, read_before(), rows)
    relative: Any = (mx.linalg.norm(found - expected) / mx.linalg.norm(expected - rows)).item()
    same = all(mx.array_equal(run_in(size), found).item() for size in range(1, MOST_ROWS))
    if not relative < _TOLERANCE or not same:
        bits = "" if same else ", and a row's bits depend on the other rows"
        _log.warning("blocks by MLX: ours are %.2g from its own%s", relative, bits)
        return False
    return True
