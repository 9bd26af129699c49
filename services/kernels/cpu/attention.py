"""Attention on a CPU in models whose passes are MLX's: a query has the same bits in any company."""

import ctypes
from typing import Any

import mlx.core as mx
import numpy as np

from services.kernels.cpu.library import address, cpu_kernels, view
from services.kernels.cpu.program import find_program
from services.kernels.cpu.structures import FLOAT, DecoderStruct, SequenceStruct


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
    program = find_program()
    if program is None or not _is_served(queries, keys, values, mask):
        return None
    _, heads, count, size = queries.shape
    kv_heads, slots = keys.shape[1:3]
    if mask is None and count > 1:
        mask = mx.ones((count, slots), mx.bool_)
    mx.eval([array for array in (queries, keys, values, mask) if isinstance(array, mx.array)])
    rows = np.ascontiguousarray(view(queries)[0].swapaxes(0, 1))
    held = [_rows_side_by_side(view(array)[0]) for array in (keys, values)]
    visible = None if not isinstance(mask, mx.array) else np.ascontiguousarray(view(mask))
    pointers = [(ctypes.c_void_p * 1)(array.ctypes.data) for array in held]
    sequence = SequenceStruct(
        *map(ctypes.addressof, pointers),
        number=FLOAT,
        head=held[0].strides[0],
        start=slots - count,
        rows=count,
    )
    if visible is not None:
        sequence.visible[0] = visible.ctypes.data
    shape = DecoderStruct(heads=heads, kv_heads=kv_heads, size=size, scale=scale)
    out = np.empty((count, heads, size), np.float32)
    library: Any = cpu_kernels()
    library.cpu_attend(
        program, ctypes.byref(shape), ctypes.byref(sequence), address(rows), address(out)
    )
    return mx.array(out)[None].swapaxes(1, 2)


def _is_served(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None
) -> bool:
    count, slots = queries.shape[2], keys.shape[2]
    if isinstance(mask, mx.array):
        fits = mask.dtype == mx.bool_ and mask.shape == (count, slots)
    else:
        fits = mask in (None, "causal") and count <= slots
    return (
        fits
        and queries.shape[0] == keys.shape[0] == 1
        and queries.dtype == keys.dtype == values.dtype == mx.float32
        and keys.shape == values.shape
        and keys.shape[-1] == queries.shape[-1]
        and queries.shape[1] % keys.shape[1] == 0
    )


def _rows_side_by_side(array: Any) -> Any:
    """Return [heads, slots, size] whose rows follow each other, any distance between heads."""
    _, slots, size = array.shape
    packed = array.strides[1:] == (size * array.itemsize, array.itemsize)
    return array if packed and slots > 1 else np.ascontiguousarray(array)
