"""Decoder blocks on CUDA by kernels of our own, for few rows of what is traced.

A pass of a small model waits for its launches and for the host that makes them, not for what
they compute. A block here is ten launches instead of eighteen, and a third of MLX's operations:
what follows a product is computed with it, and queries, keys and values are taken apart, normed
and rotated in one. Which blocks: those of the classes below whose parts are plain, tried against
MLX's own computation when a model is prepared, and timed.
"""

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.rope_utils import Llama3RoPE

from protocol.jobs.kernel_report import KernelProbe
from services.kv.slots import BUCKET
from services.mlx.cuda import product
from services.mlx.cuda.choice import TracedLinear, in_trace, serves
from services.mlx.cuda.rotate import SIZES, Heads, rotate
from services.mlx.few_rows.weights import Unfit
from services.mlx.fused_linear import FusedSlice
from services.mlx.rope import BranchRope
from services.mlx.trace_trial import measure_distance, time_in_turn

_log = logging.getLogger(__name__)

FAMILIES = ("llama", "qwen2", "qwen3")
"""Modules of mlx-lm whose `TransformerBlock` is this kind of block."""
_TOLERANCE = 0.01
"""Relative, of what a block adds to its input in half precision."""
_WORTHWHILE = 0.97
"""Share of the time of MLX's blocks that ours may take at most."""
_ROWS, _BEFORE, _BLOCKS, _TURNS = 4, 20, 4, 3
"""Of the trial, which goes through its blocks several times."""
_CLASSES: dict[type, type] = {}


class BlockKernels:
    """One block as the kernels see it.

    Raises:
        Unfit: it is of another kind.
    """

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self._qkv = _find_joint(attention, ("q_proj", "k_proj", "v_proj"))
        self._gate_up = _find_joint(mlp, ("gate_proj", "up_proj"))
        self._last = attention.o_proj, mlp.down_proj
        if any(type(layer) is not TracedLinear or "bias" in layer for layer in self._last):
            raise Unfit("the products at its ends are no plain ones")
        if "bias" in self._gate_up:
            raise Unfit("its MLP has a bias")
        self._norms = block.input_layernorm, block.post_attention_layernorm
        self._scale = attention.scale
        self._heads = _read_heads(attention, self._qkv.weight)
        self._family = sys.modules[type(block).__module__]

    def make_trial(self, blocks: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Rows, their first slot, keys and values of so many blocks, and what the rows see."""
        width, dtype = self._qkv.weight.shape[1], self._qkv.weight.dtype
        x = mx.random.normal((1, _ROWS, width), dtype, key=mx.random.key(0))
        shape = (blocks, 2, 1, self._heads.kv_heads, BUCKET, self._heads.size)
        buffers = mx.random.normal(shape, dtype, key=mx.random.key(1))
        visible = mx.arange(BUCKET)[None] <= _BEFORE + mx.arange(_ROWS)[:, None]
        return x, mx.array(_BEFORE), buffers, visible

    def takes(self, x: mx.array, cache: Any) -> bool:
        """Whether a pass over these rows is ours."""
        offset = getattr(cache, "offset", None)
        return (
            x.ndim == 3
            and x.shape[0] == 1
            and isinstance(offset, mx.array)
            and offset.size in (1, x.shape[1])
            and serves(x, self._qkv.weight)
        )

    def run(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """What the block makes of [1, n, width]."""
        output, down = self._last
        rows = self._qkv(self._norms[0](x))
        positions = cache.offset.reshape(-1).astype(mx.int32)
        queries, keys, values = rotate(rows, positions, self._heads)
        keys, values = cache.update_and_fetch(keys, values)
        # Looked up here, since `enable_packing` puts another one into its place.
        attend = self._family.scaled_dot_product_attention
        attended = attend(queries, keys, values, cache=cache, scale=self._scale, mask=mask)
        attended = attended.swapaxes(1, 2).reshape(1, x.shape[1], -1)
        x = product.multiply_add(attended, output.weight, x)
        gated = product.multiply_gated(self._norms[1](x), self._gate_up.weight)
        return product.multiply_add(gated, down.weight, x)


def _find_joint(owner: Any, names: tuple[str, ...]) -> Any:
    """The joint layer that these, and no others, are the parts of."""
    parts = [getattr(owner, name) for name in names]
    if any(type(part) is not FusedSlice or part.joint is not parts[0].joint for part in parts):
        raise Unfit(f"{', '.join(names)} are no joint product")
    if type(parts[0].joint) is not TracedLinear:
        raise Unfit(f"the product of {', '.join(names)} is MLX's")
    return parts[0].joint


def _read_heads(attention: Any, weight: mx.array) -> Heads:
    heads, kv_heads = attention.n_heads, attention.n_kv_heads
    size, rest = divmod(weight.shape[0], heads + 2 * kv_heads)
    if rest or size not in SIZES:
        raise Unfit(f"heads of {size}")
    norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    gains, eps = mx.zeros(1, weight.dtype), 0.0
    if norms != [None, None]:
        if any(type(norm) is not nn.RMSNorm for norm in norms) or norms[0].eps != norms[1].eps:
            raise Unfit("its heads are normed otherwise")
        gains, eps = mx.stack([norm.weight for norm in norms]).astype(weight.dtype), norms[0].eps
    rotated, speeds = _read_speeds(attention.rope)
    found = Heads(heads, kv_heads, size, rotated, speeds, gains, mx.array([eps], mx.float32))
    if rotated > size or rotated % 2:
        raise Unfit(f"{rotated} numbers of a head are rotated")
    mx.eval(found.speeds, found.gains, found.eps)
    return found


def _read_speeds(rope: Any) -> tuple[int, mx.array]:
    """How many numbers of a head are rotated, and by how much a position."""
    rope = rope.own if isinstance(rope, BranchRope) else rope
    if type(rope) not in {nn.RoPE, Llama3RoPE} or rope.traditional:
        raise Unfit(f"its RoPE is a {type(rope).__name__}")
    if isinstance(rope, Llama3RoPE):
        return rope.dims, 1.0 / rope._freqs.astype(mx.float32)
    powers = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
    return rope.dims, rope.scale * mx.power(mx.array(rope.base, mx.float32), -powers)


def use_blocks(model: nn.Module) -> KernelProbe | None:
    """Let few rows in traces go through our kernels in every block that is of their kind.

    After `use_products`.

    Returns:
        What was measured; None if no block is of their kind.
    """
    fit: list[tuple[Any, BlockKernels]] = []
    for _, block in model.named_modules():
        if not _is_candidate(block):
            continue
        try:
            fit.append((block, BlockKernels(block)))
        except Unfit as reason:
            _log.info("blocks by MLX: %s", reason)
    if not fit:
        return None
    found = msgspec.structs.replace(_try(fit[:_BLOCKS]), layers=len(fit))
    if found.least_rows:
        for block, kernels in fit:
            block.cuda_kernels = kernels
            block.__class__ = _class_with_kernels(type(block))
    return found


def _is_candidate(block: Any) -> bool:
    parts = (block, getattr(block, "self_attn", None), getattr(block, "mlp", None))
    homes = {f"mlx_lm.models.{family}" for family in FAMILIES}
    modules = {type(part).__module__ for part in parts}
    names = tuple(type(part).__qualname__ for part in parts)
    return (
        names == ("TransformerBlock", "Attention", "MLP") and len(modules) == 1 and modules <= homes
    )


def _class_with_kernels(plain: type) -> type:
    """The subclass whose few rows go through the block's kernels."""
    if plain not in _CLASSES:

        def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            kernels: BlockKernels = self.cuda_kernels
            if kernels.takes(x, cache):
                return kernels.run(x, mask, cache)
            by_mlx: mx.array = plain.__call__(self, x, mask, cache)
            return by_mlx

        _CLASSES[plain] = type(f"Traced{plain.__name__}", (plain,), {"__call__": call})
    return _CLASSES[plain]


class _TrialCache:
    """Buffers whose first slots are taken, as a traced pass has them."""

    is_traced = True

    def __init__(self, buffers: tuple[mx.array, mx.array], start: mx.array) -> None:
        self._buffers, self.offset = buffers, start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The whole buffers."""
        keys, values = (
            mx.slice_update(buffer, rows, self.offset[None], axes=(2,))
            for buffer, rows in zip(self._buffers, (keys, values), strict=True)
        )
        return keys, values


def _try(fit: list[tuple[Any, BlockKernels]]) -> KernelProbe:
    """Whether the kernels give what MLX gives, in less time."""
    x, start, buffers, visible = fit[0][1].make_trial(len(fit))

    def trace(*, ours: bool) -> Callable[[], mx.array]:
        def run(x: mx.array, start: mx.array, buffers: mx.array, mask: mx.array) -> mx.array:
            for (block, kernels), own in list(zip(fit, buffers, strict=True)) * _TURNS:
                cache = _TrialCache((own[0], own[1]), start)
                with in_trace():
                    x = (kernels.run if ours else block)(x, mask, cache)
            return x

        compiled: Callable[..., mx.array] = mx.compile(run)
        return partial(compiled, x, start, buffers, visible)

    by_mlx, by_us = trace(ours=False), trace(ours=True)
    probe = KernelProbe(kernel="block", shape=f"blocks of {type(fit[0][0]).__module__}")
    try:
        distance = measure_distance(by_mlx() - x, by_us() - x)
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        _log.warning("blocks by MLX: our kernels do not run here: %s", error)
        return msgspec.structs.replace(probe, reason=f"they do not run here: {error}")
    if not distance < _TOLERANCE:
        _log.warning("blocks by MLX: ours are %.2g from its own", distance)
        reason = f"what they compute is {distance:.2g} from MLX's"
        return msgspec.structs.replace(probe, reason=reason, distance=distance)
    own_s, mlx_s = time_in_turn([by_us, by_mlx])
    pays = own_s <= _WORTHWHILE * mlx_s
    _log.info("blocks: %.2f ms by our kernels, %.2f ms by MLX", 1e3 * own_s, 1e3 * mlx_s)
    count = len(fit) * _TURNS
    return msgspec.structs.replace(
        probe, least_rows=int(pays), reason="" if pays else "they are not faster than MLX's",
        distance=distance, own_ms={_ROWS: 1e3 * own_s / count}, mlx_ms={_ROWS: 1e3 * mlx_s / count},
    )  # fmt: skip
