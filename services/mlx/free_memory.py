"""The memory that MLX can still allocate in this process."""

import ctypes
import resource
import sys
from typing import Any

import mlx.core as mx

from protocol.process.free_memory import FreeMemory, free_memory
from services.mlx.loader import compute_unit

_DEFAULT_LIMIT = mx.get_memory_limit()
"""MLX's guess of a good limit; any other value was set deliberately."""


_M_MMAP_THRESHOLD = -3
"""Of glibc's `malloc.h`."""
_RETURNED_BYTES = 1 << 20


def free_for_mlx() -> FreeMemory:
    """Return the memory left under the nearest limit; MLX's cache counts as free."""
    unit, kept = compute_unit(), mx.get_cache_memory()
    info: dict[str, Any] = mx.device_info()
    limits = []
    if (limit := mx.get_memory_limit()) != _DEFAULT_LIMIT:
        limits.append(_below(limit, "MLX's memory limit"))
    if unit == "cuda":
        free = info.get("free_memory", info.get("total_memory", 0))
        return min([*limits, FreeMemory(free + kept, "the GPU's memory")])
    if limit := info.get("max_recommended_working_set_size", 0):
        limits.append(_below(limit, "the GPU's share of the machine's memory"))
    host = free_memory()
    return min([*limits, FreeMemory(host.bytes + kept, host.limit)])


def _below(limit: int, name: str) -> FreeMemory:
    return FreeMemory(max(0, limit - mx.get_active_memory()), name)


def give_back() -> None:
    """Release the memory cached by MLX and the allocator."""
    mx.clear_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def allocate_returnably() -> None:
    """Under an address-space limit, return large blocks to the system as soon as they are free.

    By default glibc raises its threshold, and a fragmented heap soon reaches the limit.
    """
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if limited and sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _RETURNED_BYTES)
