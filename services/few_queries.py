"""Attention of a few queries on CUDA, by a kernel of our own.

MLX has a fused kernel there for a single query, and cuDNN for many under a mask. A
verification and a depth of a draft tree lie between: with cuDNN each layer costs the host
75 microseconds, which for a large model is a third of the pass (docs/RESULTS.md).

One block serves one query of one head. Its warps take the keys in turn, each keeping a
running maximum, sum and weighted values (the online softmax of Milakov and Gimelshein,
2018), and are merged at the end. All arithmetic is in float32.
"""

import functools
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx

_log = logging.getLogger(__name__)

_MOST_PAIRS = 8192
"""Queries times slots: every query reads the keys for itself, which cuDNN's tiles do not."""
_WARPS = 16
_SIZES = (64, 128, 256)
"""Head sizes: each of the 32 lanes of a warp holds whole pairs of values."""
_TYPES = (mx.float16, mx.bfloat16)
_TOLERANCE = 0.01
"""Relative; half precision rounds the result to steps of .001 (float16) or .008 (bfloat16)."""

Mask = mx.array | str | None


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
) -> mx.array | None:
    """[1, heads, n, size] attention, or None where MLX's own kernels serve better.

    Args:
        queries: [1, heads, n, size].
        keys: [1, kv heads, slots, size], as values; their last axis is contiguous.
        scale: factor of the products.
        mask: bool [n, slots], "causal" or None (all slots are seen).
    """
    if not _takes(queries, keys, mask) or not _works(queries.dtype, queries.shape[-1]):
        return None
    return _launch(queries, keys, values, scale, mask)


def _takes(queries: mx.array, keys: mx.array, mask: Mask) -> bool:
    batch, _, count, size = queries.shape
    if batch != 1 or count == 1 or count * keys.shape[2] > _MOST_PAIRS or size not in _SIZES:
        return False
    if queries.dtype not in _TYPES or keys.dtype != queries.dtype:
        return False
    return not isinstance(mask, mx.array) or (
        mask.dtype == mx.bool_ and mask.shape == (count, keys.shape[2])
    )


def _launch(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
) -> mx.array:
    _, heads, count, size = queries.shape
    seen = mask if isinstance(mask, mx.array) else _no_mask()
    kind = 2 if isinstance(mask, mx.array) else int(mask == "causal")
    out = _kernel(scale)(
        inputs=[queries, keys, values, seen],
        template=[
            ("T", queries.dtype),
            ("D", size),
            ("WARPS", _WARPS),
            ("GROUP", heads // keys.shape[1]),
            ("MASK", kind),
        ],
        grid=(heads * _WARPS * 32, count, 1),
        threadgroup=(_WARPS * 32, 1, 1),
        # Tokens first: the model's next step wants the heads of a token side by side.
        output_shapes=[(1, count, heads, size)],
        output_dtypes=[queries.dtype],
    )
    rows: mx.array = out[0]
    return rows.swapaxes(1, 2)


@functools.cache
def _no_mask() -> mx.array:
    return mx.zeros((1,), mx.bool_)


@functools.cache
def _kernel(scale: float) -> Any:
    make: Any = mx.fast.cuda_kernel
    return make(
        name="few_queries",
        input_names=["q", "k", "v", "mask"],
        output_names=["out"],
        source=f"constexpr float SCALE = {scale!r}f;\n{_SOURCE}",
        header=(Path(__file__).parent / "few_queries.cuh").read_text(encoding="utf-8"),
        ensure_row_contiguous=False,
    )


_SOURCE = """
attend_one<T, D, WARPS, MASK>(
    q + (blockIdx.x * q_strides[1] + blockIdx.y * q_strides[2]), q_strides[3],
    k + (blockIdx.x / GROUP) * k_strides[1], k_strides[2],
    v + (blockIdx.x / GROUP) * v_strides[1], v_strides[2],
    mask + (MASK == 2 ? blockIdx.y * mask_strides[0] : 0),
    k_shape[2], k_shape[2] - int(gridDim.y) + int(blockIdx.y), SCALE,
    out + (blockIdx.y * gridDim.x + blockIdx.x) * D);
"""


@functools.cache
def _works(dtype: mx.Dtype, size: int) -> bool:
    """Whether the kernel compiles here and gives what MLX's own attention gives."""
    key = mx.random.key(0)
    queries = mx.random.normal((1, 4, 3, size), dtype, key=key)
    keys = mx.random.normal((1, 2, 70, size), dtype, key=key)
    values = mx.random.normal((1, 2, 70, size), dtype, key=mx.random.key(1))
    mask = mx.arange(70)[None] <= mx.array([[40], [66], [69]])
    scale = size**-0.5
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    try:
        found = _launch(queries, keys, values, scale, mask)
        distance = mx.linalg.norm((found - expected).astype(mx.float32))
        relative: Any = (distance / mx.linalg.norm(expected.astype(mx.float32))).item()
    except (RuntimeError, ValueError, OSError) as error:
        _log.warning("the attention kernel for few queries does not run here: %s", error)
        return False
    if not relative < _TOLERANCE:
        _log.warning("the attention kernel for few queries is %.2g from MLX's: not used", relative)
        return False
    return True
