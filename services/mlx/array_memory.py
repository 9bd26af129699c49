"""Arrays as memory, for what computes outside MLX."""

import ctypes
from typing import Any

import mlx.core as mx
import numpy as np


def view(array: mx.array) -> Any:
    """The array's own memory; nothing is copied."""
    return np.asarray(memoryview(array))  # type: ignore[arg-type]  # it has a buffer


def address(array: Any) -> ctypes.c_void_p:
    """Where a numpy array's elements begin."""
    return ctypes.c_void_p(array.__array_interface__["data"][0])
