"""Buffers of keys and values, [1, heads, slots, size], and where a sequence's are.

Usually they are arrays of MLX, which forks share until one of them writes. Kernels that write in
place need memory of their own: on a CPU buffers that belong to one sequence alone
(`ResidentSlots`), on CUDA also a seat in a table (`services.engine.slot_table`). While there is
one, the caches hold no arrays, so that no reference is kept to memory that changes.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from services.engine.batch import round_to_bucket
from services.kernels.cpu.library import cpu_kernels, view

Pair = tuple[mx.array, mx.array]
"""Keys and values of a layer."""


class SlotMemory(Protocol):
    """Memory in which kernels write a sequence's slots in place."""

    def leave(self, length: int) -> Sequence[Pair]:
        """Give it up; return at least the first `length` slots of each layer as arrays of MLX."""
        ...

    def move(self, slots: Sequence[int], to: int) -> None:
        """Copy these slots, in rising order, to those from `to` on, which start before them."""
        ...

    @property
    def arrays(self) -> Sequence[mx.array]:
        """The buffers that belong to this sequence alone."""
        ...

    @property
    def milestones(self) -> list[mx.array]:
        """One array per layer that is computed once the pass has stored its rows."""
        ...

    def evaluate(self) -> None:
        """Evaluate what has been stored."""
        ...


class ResidentSlots:
    """Buffers that CPU kernels write in place, for `c/pass.h`, and no others refer to."""

    def __init__(self, buffers: Sequence[Pair]) -> None:
        self._buffers = buffers
        self.arrays = [array for pair in buffers for array in pair]
        _, self._heads, self.slots, size = self.arrays[0].shape
        self._slot = size * self.arrays[0].itemsize
        self.head = self.slots * self._slot  # bytes from one head to the next
        addresses = [view(array).ctypes.data for array in self.arrays]
        self._all = (ctypes.c_void_p * len(addresses))(*addresses)
        self.keys = (ctypes.c_void_p * len(buffers))(*addresses[::2])
        self.values = (ctypes.c_void_p * len(buffers))(*addresses[1::2])
        self.milestones = [keys for keys, _ in buffers]

    def leave(self, length: int) -> Sequence[Pair]:
        """Return the buffers."""
        del length
        return self._buffers

    def move(self, slots: Sequence[int], to: int) -> None:
        """Copy these slots to those from `to` on."""
        kernels: Any = cpu_kernels()
        kernels.cpu_move_slots(
            len(self._all), self._all, self._heads, ctypes.c_long(self.head), self._slot,
            len(slots), (ctypes.c_int * len(slots))(*slots), to,
        )  # fmt: skip

    def evaluate(self) -> None:
        """Do nothing: a pass has stored its rows when it ends."""


def copy_slots(
    buffer: mx.array | None, shape: tuple[int, int, int, int], dtype: mx.Dtype
) -> mx.array:
    """Copy the buffer to one of this shape and type."""
    wider = mx.zeros(shape, dtype)
    mx.eval(wider)
    if buffer is not None:
        given = buffer.astype(dtype)
        mx.eval(given)
        slots = min(shape[2], given.shape[2])
        view(wider)[..., :slots, :] = view(given)[..., :slots, :]
    return wider


def grow(buffer: mx.array | None, end: int) -> mx.array:
    """Return the buffer with room for `end` slots."""
    if buffer is None:
        raise ValueError("a chain without tokens before it has no buffers to be traced with")
    missing = round_to_bucket(end) - buffer.shape[2]
    return buffer if missing <= 0 else mx.pad(buffer, [(0, 0), (0, 0), (0, missing), (0, 0)])


def store_rows(buffer: mx.array | None, rows: mx.array, start: int) -> mx.array:
    """Return `buffer` with `rows` at slot `start`, grown if necessary."""
    end = start + rows.shape[2]
    capacity = 0 if buffer is None else buffer.shape[2]
    if buffer is None or end > capacity:
        slots = round_to_bucket(end)
        grown = mx.zeros((1, rows.shape[1], slots, rows.shape[3]), rows.dtype)
        if buffer is not None:
            grown[..., :capacity, :] = buffer
        buffer = grown
    buffer[..., start:end, :] = rows
    return buffer
