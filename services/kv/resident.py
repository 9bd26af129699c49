"""Keys and values that CPU kernels write to where they are.

MLX writes to a buffer in place only if nobody else holds it, and so must we: the buffers of
all layers are copied once, and from then on belong to the store alone. As soon as anybody asks
for one of them, who may keep it, the next pass has to begin with copies again.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from services.kv.slots import SlotCache
from services.mlx.array_memory import view
from services.mlx.blas import cpu_kernels


class ResidentSlots:
    """The buffers of all layers of one sequence, for the kernels of `mlx/cpu/pass.c`.

    Args:
        caches: of all layers; their buffers become new ones.
        heads: of keys and values.
        slots: what there is room for.
        size: of a head.
    """

    def __init__(self, caches: Sequence[SlotCache], heads: int, slots: int, size: int) -> None:
        self.slots = slots
        self.head = slots * size
        """Elements from one head to the next."""
        self._heads, self._size = heads, size
        buffers = [view(array) for cache in caches for array in cache.settle(heads, slots, size)]
        addresses = [buffer.ctypes.data for buffer in buffers]
        self._all = (ctypes.c_void_p * len(buffers))(*addresses)
        self.keys = (ctypes.c_void_p * len(caches))(*addresses[::2])
        self.values = (ctypes.c_void_p * len(caches))(*addresses[1::2])

    def move(self, slots: Sequence[int], to: int) -> None:
        """Copy these slots, in rising order, to those from `to` on, which begin before them."""
        kernels: Any = cpu_kernels()
        kernels.cpu_move_slots(
            len(self._all), self._all, self._heads, ctypes.c_long(self.head), self._size,
            len(slots), (ctypes.c_int * len(slots))(*slots), to,
        )  # fmt: skip
