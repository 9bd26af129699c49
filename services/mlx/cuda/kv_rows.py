"""Keys and values of a few rows, written into the buffers of a layer where these are, on CUDA.

MLX's own operations write into a buffer in place only if nothing holds it any more. A pass that is
built while another one is at work finds it held, and copies it: which layers are copied depends on
how far the device is, and CUDA takes 5 to 17 ms to make a graph of launches that it has not met yet
(docs/lab/cuda-forward.md). Here nothing is copied. Who calls has to own the buffers
(`KVStore.own`), and to have whatever reads them wait for the rows (`wait_for`).
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from services.mlx.cuda.kernel import build
from services.mlx.loader import compute_unit

_log = logging.getLogger(__name__)

_TYPES = (mx.float16, mx.bfloat16)
_THREADS = 256

_WRITE = """
const long at = long(blockIdx.x) * blockDim.x + threadIdx.x, rows = new_k_shape[2];
if (at < HEADS * rows * D) {
  write_number<T, D>(at, rows, new_k, new_k_strides[1], new_k_strides[2], new_k_strides[3],
                     const_cast<T*>(all_k), all_k_shape[2], slots);
  write_number<T, D>(at, rows, new_v, new_v_strides[1], new_v_strides[2], new_v_strides[3],
                     const_cast<T*>(all_v), all_k_shape[2], slots);
}
if (at == 0) done[0] = T(0.0f);
"""
_MOVE = """
const long at = long(blockIdx.x) * blockDim.x + threadIdx.x;
if (at < HEADS * D) {
  T* all = const_cast<T*>(blockIdx.y ? all_v : all_k);
  move_number<T, D>(at, all, all_k_shape[2], slots, slots_shape[0], int(to[0]));
}
if (at == 0) done[0] = T(0.0f);
"""


class KVBuffers(NamedTuple):
    """Where the rows of a pass belong in a layer."""

    keys: mx.array
    """[1, heads, slots, size], contiguous, as `values`."""
    values: mx.array
    slots: mx.array
    """[rows] int32, different ones."""


class InPlace:
    """Rows of a layer's cache in a trace that are written in place.

    Args:
        keys: [1, heads, slots, size], as `values`.
        values: of the layer.
        slots: of the rows.
        owned: whether the trace may write into the buffers where they are.
    """

    def __init__(self, keys: mx.array, values: mx.array, slots: mx.array, *, owned: bool) -> None:
        in_place = owned and writes_in_place(keys, values)
        self.into = KVBuffers(keys, values, slots) if in_place else None
        """Where rows are written in place."""
        self.written: mx.array | None = None
        """There when they are written."""
        self.pending: mx.array | None = None
        """See `wait_for`."""

    def write_rows(self, keys: mx.array, values: mx.array) -> bool:
        """Write [1, heads, rows, size] in place, if that is how rows are written."""
        if self.into is None:
            return False
        self.pending = self.written = write(self.into, keys, values)
        return True


def find_written(layers: Sequence[InPlace]) -> list[mx.array]:
    """Return an array of each layer that is there once its rows are; empty if not in place.

    Raises:
        ValueError: they are in some of the layers.
    """
    found = [layer.written for layer in layers if layer.written is not None]
    if len(found) not in {0, len(layers)}:
        raise ValueError(f"{len(found)} of {len(layers)} layers are written in place")
    return found


def writes_in_place(keys: mx.array, values: mx.array) -> bool:
    """Return whether rows are written into buffers of this kind, [1, heads, slots, size]."""
    fits = keys.dtype in _TYPES and keys.dtype == values.dtype and keys.shape == values.shape
    return fits and compute_unit() == "cuda" and _works(keys.dtype)


def write(into: KVBuffers, keys: mx.array, values: mx.array) -> mx.array:
    """Write [1, heads, rows, size]; returns [1], a zero that is there when they are."""
    arrays = {
        "new_k": keys,
        "new_v": values,
        "all_k": into.keys,
        "all_v": into.values,
        "slots": into.slots,
    }
    return _launch(_WRITE, arrays, keys.shape[2], 1)


def move(keys: mx.array, values: mx.array, slots: mx.array, to: int) -> mx.array:
    """Copy the rows in these rising slots to those from `to` on; [1], there when that is done.

    To be launched before anything else is built that uses the buffers.
    """
    inputs = {"all_k": keys, "all_v": values, "slots": slots}
    # Two words: so much MLX keeps in the host's memory.
    inputs["to"] = mx.array(np.array([to, 0], np.uint32))
    return _launch(_MOVE, inputs, 1, 2)


def _launch(body: str, inputs: dict[str, mx.array], rows: int, sides: int) -> mx.array:
    """[1] what this kernel gives when it is done.

    Args:
        body: of the kernel.
        inputs: by name; `all_k` among them.
        rows: of which each number has a thread.
        sides: 2 if keys and values have threads of their own, else 1.
    """
    _, heads, _, size = inputs["all_k"].shape
    dtype, blocks = inputs["all_k"].dtype, -(-heads * rows * size // _THREADS)
    make = build(("kv_rows.cuh",), body, tuple(inputs), contiguous=False, outputs=("done",))
    [done] = make(
        inputs=list(inputs.values()),
        template=[("T", dtype), ("D", size), ("HEADS", heads)],
        grid=(blocks * _THREADS, sides, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[dtype],
    )
    return done


def wait_for(written: mx.array | None, queries: mx.array) -> mx.array:
    """The queries, for an attention that begins when these rows are written."""
    return queries if written is None else queries + written


@functools.cache
def _works(dtype: mx.Dtype) -> bool:
    """Return whether rows come to be where they belong, and nothing else changes."""
    try:
        is_right = _try(dtype)
    except (RuntimeError, ValueError, OSError) as error:
        _log.warning("keys and values are not written in place: %s", error)
        return False
    if not is_right:
        _log.warning("keys and values are not written in place: they were wrong in a trial")
    return is_right


def _try(dtype: mx.Dtype) -> bool:
    before = [mx.random.normal((1, 2, 16, 8), dtype, key=mx.random.key(seed)) for seed in (1, 2)]
    rows = [mx.random.normal((1, 3, 2, 8), dtype, key=mx.random.key(seed)) for seed in (3, 4)]
    slots = mx.array([9, 3, 12], mx.int32)
    mx.eval(before, rows)
    keys, values = (_read(array) for array in before)
    keys[:, :, [9, 3, 12]], values[:, :, [9, 3, 12]] = (_read(row.swapaxes(1, 2)) for row in rows)
    # Reading has moved them; the kernel gets memory of the device.
    into = [mx.maximum(array, array) for array in before]
    mx.eval(into)
    mx.eval(write(KVBuffers(into[0], into[1], slots), *(row.swapaxes(1, 2) for row in rows)))
    mx.eval(move(into[0], into[1], mx.array([3, 4, 9], mx.int32), 2))
    for array in (keys, values):
        array[:, :, [2, 3, 4]] = array[:, :, [3, 4, 9]]
    return bool(np.array_equal(_read(into[0]), keys) and np.array_equal(_read(into[1]), values))


def _read(array: mx.array) -> Any:
    return np.array(array.astype(mx.float32))
