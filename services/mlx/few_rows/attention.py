"""Attention on MLX's CPU backend by our own kernel (`cpu/attention.c`).

MLX's spends most of its time in the softmax, about forty nanoseconds per element: for a
verification of four tokens after a thousand others that is more than half of the pass. The kernel
runs outside MLX's graph, so its inputs are evaluated first.
"""

import ctypes
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from services.mlx.array_memory import view
from services.mlx.blas import cpu_kernels

Rows = npt.NDArray[np.float32]

_WIDEST = 256
_LANES = 8
"""Floats of a vector register; head sizes must be multiples of it."""


class AttentionCall(ctypes.Structure):
    """`struct attention` of `cpu/attention.h`; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "mask", "out")),
        *((name, ctypes.c_void_p) for name in ("fresh_k", "fresh_v")),
        *((name, ctypes.c_long) for name in ("q_head", "q_row", "k_head", "k_row")),
        *((name, ctypes.c_long) for name in ("v_head", "v_row", "mask_row")),
        *((name, ctypes.c_long) for name in ("fresh_head", "fresh_row")),
        *(
            (name, ctypes.c_int)
            for name in ("heads", "kv_heads", "queries", "slots", "old", "size")
        ),
        ("causal", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array | None:
    """Compute [1, heads, n, size] attention, or return None where MLX must compute it.

    Args:
        queries: [1, heads, n, size].
        keys: [1, kv heads, slots, size], as values.
        scale: factor of the products.
        mask: the slots each query attends to: bool [n, slots], "causal", or None for all.
    """
    if cpu_kernels() is None or not _is_served(queries, keys, values, mask):
        return None
    mx.eval([array for array in (queries, keys, values, mask) if isinstance(array, mx.array)])
    _, heads, count, size = queries.shape
    out = np.empty((count, heads, size), np.float32)
    if not _attend(view(queries), keys, values, scale, mask, out):
        return None
    return mx.array(out)[None].swapaxes(1, 2)


def _attend(  # noqa: PLR0917  # `attend`'s arguments, and where the answer goes
    queries: Rows,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    out: Rows,
) -> bool:
    """Compute `attend` for evaluated arrays into [n, heads, size]; False if unsupported."""
    kernels = cpu_kernels()
    if kernels is None or not _is_served(queries, keys, values, mask):
        return False
    views = [queries, *(view(one) for one in (keys, values, mask) if isinstance(one, mx.array))]
    if any(own.strides[-1] != own.itemsize for own in views):
        return False
    call = _describe(views, out, scale, causal=isinstance(mask, str))
    kernels.cpu_attention(ctypes.byref(call))
    return True


def _is_served(
    queries: mx.array | Rows, keys: mx.array, values: mx.array, mask: mx.array | str | None
) -> bool:
    _, heads, count, size = queries.shape
    slots = keys.shape[2]
    if isinstance(mask, mx.array):
        fits = mask.dtype == mx.bool_ and mask.shape == (count, slots)
    else:
        fits = mask in (None, "causal") and count <= slots
    return (
        fits
        and queries.shape[0] == keys.shape[0] == 1
        and queries.dtype in (mx.float32, np.float32)
        and keys.dtype == values.dtype == mx.float32
        and keys.shape == values.shape
        and keys.shape[-1] == size
        and heads % keys.shape[1] == 0
        and size % _LANES == 0
        and size <= _WIDEST
    )


def _describe(views: list[Any], out: Any, scale: float, *, causal: bool) -> AttentionCall:
    queries, keys, values, *masks = views
    strides = {
        f"{name}_{axis}": view.strides[at] // view.itemsize
        for name, view in (("q", queries), ("k", keys), ("v", values))
        for axis, at in (("head", 1), ("row", 2))
    }
    return AttentionCall(
        q=queries.ctypes.data,
        k=keys.ctypes.data,
        v=values.ctypes.data,
        mask=masks[0].ctypes.data if masks else None,
        out=out.ctypes.data,
        mask_row=masks[0].strides[0] if masks else 0,
        heads=queries.shape[1],
        kv_heads=keys.shape[1],
        queries=queries.shape[2],
        slots=keys.shape[2],
        old=keys.shape[2],
        size=keys.shape[3],
        causal=causal,
        scale=scale,
        **strides,
    )
