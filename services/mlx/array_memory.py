"""Raw memory of arrays, for computations outside MLX."""

import ctypes
from typing import Any

import mlx.core as mx
import numpy as np


def view(array: mx.array) -> Any:
    """Return the array's own memory without a copy."""
    return np.asarray(memoryview(array))  # type: ignore[arg-type]  # it has a buffer


def address(array: Any) -> ctypes.c_void_p:
    """Return the address of a numpy array's first element."""
    return ctypes.c_void_p(array.__array_interface__["data"][0])
