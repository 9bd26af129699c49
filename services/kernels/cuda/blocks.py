"""Decoder blocks on CUDA by our own kernels, for few rows in traces.

A pass of a small model waits for launches and for the host that issues them, not for the
arithmetic. A block here is six launches instead of eighteen, and a quarter of MLX's operations:
whatever surrounds a product is fused with it, and one kernel splits, norms, rotates and stores
queries, keys and values. It applies to blocks of `_FAMILIES` whose parts are plain, after a
self-test (`block_trial`) when a model is prepared.
"""

import functools
import logging
import sys
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.rope_utils import Llama3RoPE

from protocol.jobs.kernel_report import KernelProbe
from services.kernels.cuda import product
from services.kernels.cuda.attention import attends_any_length
from services.kernels.cuda.block_trial import BLOCKS, compare
from services.kernels.cuda.choice import TracedLinear, use_products
from services.kernels.cuda.rotate import SIZES, HeadNorm, Heads, rotate, rotate_into
from services.mlx.fused_linear import FusedSlice
from services.mlx.patches import Patch, Unfit, install, patches_of, remove_all
from services.mlx.rope import BranchRope
from services.runtime.preparation import Steps

_log = logging.getLogger(__name__)


_FAMILIES = ("llama", "qwen2", "qwen3")
"""Modules of mlx-lm whose `TransformerBlock` is x + attention(norm(x)), then x + MLP(norm(x))."""


class BlockWeights(NamedTuple):
    """All arrays of a block, in the order of `Layer` in persistent.cuh."""

    gain: mx.array
    qkv: mx.array
    bias: mx.array | None
    head_gains: mx.array | None
    output: mx.array
    mlp_gain: mx.array
    gate_up: mx.array
    down: mx.array


class BlockKernels:
    """One block as seen by the kernels.

    Raises:
        Unfit: the block is of another kind.
    """

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self._qkv = _find_joint(attention, ("q_proj", "k_proj", "v_proj"))
        self._gate_up = _find_joint(mlp, ("gate_proj", "up_proj"))
        self._last = attention.o_proj, mlp.down_proj
        without_bias = (*self._last, self._gate_up)
        if any(type(layer) is not TracedLinear or "bias" in layer for layer in without_bias):
            raise Unfit("only the product of queries, keys and values may have a bias")
        norms = block.input_layernorm, block.post_attention_layernorm
        self._norms = [_read_norm(norm, self.weight.dtype) for norm in norms]
        self.scale = attention.scale
        self.heads = _read_heads(attention, self._qkv.weight)
        self._family = sys.modules[type(block).__module__]

    @property
    def weight(self) -> mx.array:
        """[queries, keys and values, width] weight of the first product."""
        weight: mx.array = self._qkv.weight
        return weight

    @property
    def weights(self) -> BlockWeights:
        """Its arrays."""
        output, down = self._last
        head_norm, bias = self.heads.norm, self._qkv.get("bias")
        return BlockWeights(
            self._norms[0].gain, self._qkv.weight, bias,
            None if head_norm is None else head_norm.gains, output.weight,
            self._norms[1].gain, self._gate_up.weight, down.weight,
        )  # fmt: skip

    @property
    def waits_for_rows(self) -> bool:
        """True if its attention waits for the rows (`kv_rows.wait_for`)."""
        attend = getattr(self._family, "scaled_dot_product_attention", None)
        return getattr(attend, "waits_for_rows", False)

    def takes(self, x: mx.array, cache: Any) -> bool:
        """Return True if our kernels serve a pass over these rows."""
        positions = _find_positions(cache)
        return (
            x.ndim == 3
            and x.shape[0] == 1
            and isinstance(positions, mx.array)
            and positions.shape == (x.shape[1],)
            and self._qkv.serves(x)
        )

    def run(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """Return the output of the block for [1, n, width]."""
        output, down = self._last
        rows = self._qkv.multiply(x, self._norms[0])
        positions = _find_positions(cache)
        if (into := getattr(cache, "into", None)) is not None:
            cache.written = queries = rotate_into(rows, positions, self.heads, into)
            keys, values = cache.fetch()
        else:
            queries, keys, values = rotate(rows, positions, self.heads)
            keys, values = cache.update_and_fetch(keys, values)
        # Looked up at call time, since `enable_packing` replaces it.
        attend = self._family.scaled_dot_product_attention
        attended = attend(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        attended = attended.swapaxes(1, 2).reshape(1, x.shape[1], -1)
        x = product.multiply(attended, output.weight, more=x)
        gated = product.multiply(x, self._gate_up.weight, norm=self._norms[1], gated=True)
        return product.multiply(gated, down.weight, more=x)


def _find_positions(cache: Any) -> Any:
    """Return [rows] positions of a pass, in a trace over one sequence or over a table."""
    return cache.positions if hasattr(cache, "positions") else getattr(cache, "offset", None)


def _find_joint(owner: Any, names: tuple[str, ...]) -> Any:
    """Return the joint layer of these parts."""
    parts = [getattr(owner, name) for name in names]
    if any(type(part) is not FusedSlice or part.joint is not parts[0].joint for part in parts):
        raise Unfit(f"{', '.join(names)} are no joint product")
    if type(parts[0].joint) is not TracedLinear:
        raise Unfit(f"the product of {', '.join(names)} is MLX's")
    return parts[0].joint


def _read_norm(norm: Any, dtype: mx.Dtype) -> product.Norm:
    if type(norm) is not nn.RMSNorm or norm.weight.dtype != dtype:
        raise Unfit("it is normed otherwise, or in another type")
    return product.Norm(norm.weight, norm.eps)


def _read_heads(attention: Any, weight: mx.array) -> Heads:
    heads, kv_heads = attention.n_heads, attention.n_kv_heads
    size, rest = divmod(weight.shape[0], heads + 2 * kv_heads)
    if rest or size not in SIZES:
        raise Unfit(f"heads of {size}")
    norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    norm: HeadNorm | None = None
    if norms != [None, None]:
        if any(type(norm) is not nn.RMSNorm for norm in norms) or norms[0].eps != norms[1].eps:
            raise Unfit("its heads are normed otherwise")
        gains = mx.stack([norm.weight for norm in norms]).astype(weight.dtype)
        norm = HeadNorm(gains, norms[0].eps)
        mx.eval(gains)
    rotated, speeds = _read_speeds(attention.rope)
    if rotated > size or rotated % 2:
        raise Unfit(f"{rotated} numbers of a head are rotated")
    mx.eval(speeds)
    return Heads(heads, kv_heads, size, rotated, speeds, norm)


def _read_speeds(rope: Any) -> tuple[int, mx.array]:
    """Return the number of rotated elements of a head, and the angle per position."""
    rope = rope.own if isinstance(rope, BranchRope) else rope
    if type(rope) not in {nn.RoPE, Llama3RoPE} or rope.traditional:
        raise Unfit(f"its RoPE is a {type(rope).__name__}")
    if isinstance(rope, Llama3RoPE):
        return rope.dims, 1.0 / rope._freqs.astype(mx.float32)
    powers = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
    return rope.dims, rope.scale * mx.power(mx.array(rope.base, mx.float32), -powers)


def is_plain_block(block: Any) -> bool:
    """Return True if this module is an unmodified block of one of the families."""
    parts = (block, getattr(block, "self_attn", None), getattr(block, "mlp", None))
    homes = {f"mlx_lm.models.{family}" for family in _FAMILIES}
    modules = {type(part).__module__ for part in parts}
    names = tuple(type(part).__qualname__ for part in parts)
    return (
        names == ("TransformerBlock", "Attention", "MLP") and len(modules) == 1 and modules <= homes
    )


def route_through(block: Any, kernels: BlockKernels) -> Patch:
    """Route the passes that these kernels take through them; all others stay MLX's."""
    return Patch(block, with_kernels, {"kernels": kernels})


def find_kernels(model: Any) -> list[BlockKernels]:
    """Return the kernels of all blocks of a model, in order; empty if one of them has none."""
    if not isinstance(model, nn.Module):
        return []
    blocks = list(getattr(model, "layers", []))
    if not all(any(patch.change is with_kernels for patch in patches_of(one)) for one in blocks):
        return []
    return [block.kernels for block in blocks]


@functools.cache
def with_kernels(plain: type) -> type:
    """Derive the class of blocks with kernels."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        kernels: BlockKernels = self.kernels
        if kernels.takes(x, cache):
            return kernels.run(x, mask, cache)
        by_mlx: mx.array = plain.__call__(self, x, mask, cache)
        return by_mlx

    return type(f"{plain.__name__}WithKernels", (plain,), {"__call__": call})


def equip_for_cuda(model: Any) -> Steps[list[KernelProbe]]:
    """Let traces use our kernels where that pays, in a model whose products are joined.

    Returns:
        The measurements; empty if the model is not supported.
    """
    products = yield from use_products(model)
    blocks = None if products is None else (yield from use_blocks(model, products))
    return [probe for probe in (products, blocks) if probe is not None]


def use_blocks(model: nn.Module, products: KernelProbe) -> Steps[KernelProbe | None]:
    """Route few rows in traces through our kernels in every supported block.

    Replaces the choice of an earlier call.

    Args:
        model: its products must have been chosen.
        products: the result of their test; blocks serve as many rows.

    Returns:
        The measurements; None if no block is supported, or no product is ours.
    """
    fit: list[tuple[Any, BlockKernels]] = []
    remove_all(model, with_kernels)
    for _, block in model.named_modules():
        if not products.least_rows or not is_plain_block(block):
            continue
        try:
            fit.append((block, BlockKernels(block)))
        except Unfit as reason:
            _log.info("blocks by MLX: %s", reason)
    if not fit:
        return None
    compared = yield from compare(fit[:BLOCKS], products)
    found = msgspec.structs.replace(compared, layers=len(fit))
    if found.least_rows:
        install(route_through(*pair) for pair in fit)
    return found


def can_write_in_place(model: Any) -> bool:
    """Return True if attention to the rows of a pass is known to wait until they are written."""
    kernels = find_kernels(model)
    return bool(kernels) and all(block.waits_for_rows for block in kernels)


def serves_any_length(model: Any) -> bool:
    """Return True if replays over buffers of another size need no new kernels or plans."""
    kinds = {(block.heads.size, block.weight.dtype) for block in find_kernels(model)}
    return bool(kinds) and all(attends_any_length(*kind) for kind in kinds)
