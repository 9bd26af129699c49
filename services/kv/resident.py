"""Keys and values that CPU kernels write in place.

In-place writes are safe only while no other reference to a buffer exists: the buffers of all layers
are copied once, and then belong to the store alone. Once a caller takes a reference to one of them,
which it may keep, the next pass must copy them again.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from services.kv.slots import Shape, SlotCache
from services.mlx.array_memory import view
from services.mlx.blas import cpu_kernels


class ResidentSlots:
    """New buffers [1, KV heads, slots, size] of all layers of a sequence, for `c/pass.h`."""

    def __init__(self, caches: Sequence[SlotCache], shape: Shape, dtype: mx.Dtype) -> None:
        _, self._heads, self.slots, size = shape
        self._slot = size * dtype.size
        self.head = self.slots * self._slot  # bytes from one head to the next
        buffers = [view(array) for cache in caches for array in cache.settle(shape, dtype)]
        addresses = [buffer.ctypes.data for buffer in buffers]
        self._all = (ctypes.c_void_p * len(buffers))(*addresses)
        self.keys = (ctypes.c_void_p * len(caches))(*addresses[::2])
        self.values = (ctypes.c_void_p * len(caches))(*addresses[1::2])

    def move(self, slots: Sequence[int], to: int) -> None:
        """Copy these slots, in rising order, to those from `to` on, which start before them."""
        kernels: Any = cpu_kernels()
        kernels.cpu_move_slots(
            len(self._all), self._all, self._heads, ctypes.c_long(self.head), self._slot,
            len(slots), (ctypes.c_int * len(slots))(*slots), to,
        )  # fmt: skip
