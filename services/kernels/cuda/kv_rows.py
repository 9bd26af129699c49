"""Keys and values of a few rows, written in place into a layer's buffers on CUDA.

MLX's own operations write in place only if no other reference to a buffer exists. A pass that is
built while another one runs finds a reference, and copies: which layers are copied depends on the
device's progress, and CUDA takes 5 to 17 ms to instantiate a new graph of launches
(docs/lab/cuda-forward.md). Here nothing is copied. The caller must own the buffers (`KVStore.own`),
and must make every reader wait for the rows (`wait_for`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from services.engine.batch import BatchArrays
from services.kernels.cuda.kernel import build
from services.mlx.loader import compute_unit
from services.mlx.selftest import is_right

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
    """The buffers and slots for the rows of a pass in a layer."""

    keys: mx.array
    """[1, heads, slots, size], contiguous, like `values`."""
    values: mx.array
    slots: mx.array
    """[rows] int32, distinct."""


Attend = Callable[..., mx.array]
"""Attention over buffers that sequences share.

(queries [1, heads, rows, size], keys [kv heads, all slots, size], values, mask [rows, slots], first
[rows], scale) -> [1, heads, rows, size]; row i attends to the slots from first[i] on.
"""


@dataclass(frozen=True)
class SharedKV:
    """Keys, values or masks of several sequences, in place of one sequence's array."""

    content: Any
    attend: Callable[..., mx.array]
    """mlx-lm's attention, over contents of keys and values."""


class TracedLayer:
    """A layer's buffers during a pass over a batch, in the form of an mlx-lm KV cache.

    Args:
        keys: [1, heads, slots, size], like `values`.
        values: of the layer.
        batch: the rows of the pass, which are written in place if possible.
        owned: True if they may be written into the buffers in place.
        attend: the attention of a batch whose sequences share the buffers.
    """

    is_traced = True
    """Attention over it must be part of the graph."""

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        batch: BatchArrays,
        *,
        owned: bool = False,
        attend: Attend | None = None,
    ) -> None:
        in_place = owned and writes_in_place(keys, values)
        self.into = KVBuffers(keys, values, batch.slots) if in_place else None
        """The target of in-place writes."""
        self.keys, self.values, self._batch, self._attend = keys, values, batch, attend
        self.offset, self.positions = batch.offset, batch.positions
        self.written: mx.array | None = None
        """Computed once the rows are written."""
        self.pending: mx.array | None = None
        """See `wait_for`."""

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Return the slots each of the `n` rows attends to, bool [n, slots]."""
        del return_array
        if n != self._batch.count:
            raise ValueError(f"a mask of {n} rows for a batch of {self._batch.count}")
        return self._batch.make_mask(self.keys.shape[2], window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Store [1, heads, rows, size]; return the whole buffers."""
        if self.into is not None:
            self.pending = self.written = write(self.into, keys, values)
        else:
            slots = self._batch.slots[None, None, :, None]
            # One launch each; `slice_update` needs two, since only the device knows its start, and
            # an assignment six: it makes indices of the heads and converts them.
            self.keys = mx.put_along_axis(self.keys, slots, keys, axis=2)
            self.values = mx.put_along_axis(self.values, slots, values, axis=2)
        return self.fetch()

    def fetch(self) -> Any:
        """Return the whole buffers."""
        if self._attend is None:
            return self.keys, self.values
        pair = self.keys, self.values
        return tuple(SharedKV(buffer.squeeze(0), self._attend_shared) for buffer in pair)

    def _attend_shared(  # noqa: PLR0917  # mlx-lm's signature
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        del cache, mask
        if self._attend is None or sinks is not None:
            raise TypeError("attention over a table has no sinks")
        return self._attend(queries, keys, values, self._batch.visible, self._batch.first, scale)


def find_written(layers: Sequence[TracedLayer]) -> list[mx.array]:
    """Return an array of each layer that is computed once its rows are written in place.

    Raises:
        ValueError: only some of the layers are written in place.
    """
    written = [layer.written for layer in layers if layer.written is not None]
    if len(written) not in {0, len(layers)}:
        raise ValueError(f"{len(written)} of {len(layers)} layers are written in place")
    return written


def writes_in_place(keys: mx.array, values: mx.array) -> bool:
    """Return True if rows are written in place in such buffers, [1, heads, slots, size]."""
    fits = keys.dtype in _TYPES and keys.dtype == values.dtype and keys.shape == values.shape
    return fits and compute_unit() == "cuda" and _works(keys.dtype)


def write(into: KVBuffers, keys: mx.array, values: mx.array) -> mx.array:
    """Write [1, heads, rows, size]; returns [1], a zero that is computed once they are written."""
    arrays = {
        "new_k": keys,
        "new_v": values,
        "all_k": into.keys,
        "all_v": into.values,
        "slots": into.slots,
    }
    return _launch(_WRITE, arrays, keys.shape[2], 1)


def move(keys: mx.array, values: mx.array, slots: mx.array, to: int) -> mx.array:
    """Copy the rows in these rising slots to those from `to` on; returns [1], computed when done.

    It must be launched before anything else that uses the buffers is built.
    """
    inputs = {"all_k": keys, "all_v": values, "slots": slots}
    # Two words: MLX keeps an array this small in host memory.
    inputs["to"] = mx.array(np.array([to, 0], np.uint32))
    return _launch(_MOVE, inputs, 1, 2)


def _launch(body: str, inputs: dict[str, mx.array], rows: int, sides: int) -> mx.array:
    """Launch this kernel; return its [1] completion output.

    Args:
        body: of the kernel.
        inputs: by name; `all_k` among them.
        rows: number of rows, with one thread per element.
        sides: 2 if keys and values have separate threads, else 1.
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
    """Return the queries, for an attention that starts once these rows are written."""
    return queries if written is None else queries + written


@functools.cache
def _works(dtype: mx.Dtype) -> bool:
    """Return True if rows are written to their slots, and nothing else changes."""
    before = [mx.random.normal((1, 2, 16, 8), dtype, key=mx.random.key(seed)) for seed in (1, 2)]
    rows = [mx.random.normal((1, 3, 2, 8), dtype, key=mx.random.key(seed)) for seed in (3, 4)]
    inputs = [(before, [row.swapaxes(1, 2) for row in rows])]
    what = "keys and values written in place"
    return is_right(what, "bits", _write_by_hand, _write_and_move, inputs)


def _write_by_hand(before: list[mx.array], rows: list[mx.array]) -> list[mx.array]:
    buffers: list[Any] = [np.array(array.astype(mx.float32)) for array in before]
    for buffer, row in zip(buffers, rows, strict=True):
        buffer[:, :, [9, 3, 12]] = np.array(row.astype(mx.float32))
        buffer[:, :, [2, 3, 4]] = buffer[:, :, [3, 4, 9]]
    return [mx.array(buffer) for buffer in buffers]


def _write_and_move(before: list[mx.array], rows: list[mx.array]) -> list[mx.array]:
    # Reading has moved them; the kernel needs device memory.
    keys, values = [mx.maximum(array, array) for array in before]
    mx.eval(keys, values)
    mx.eval(write(KVBuffers(keys, values, mx.array([9, 3, 12], mx.int32)), *rows))
    mx.eval(move(keys, values, mx.array([3, 4, 9], mx.int32), 2))
    return [keys, values]
