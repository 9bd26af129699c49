"""The best few of each row of logits on the CPU, by `cpu/best.c`."""

import ctypes
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from services.mlx.blas import cpu_kernels

_MOST = 256
"""Wanted of a row; more are rarely asked for, and sorting all of them is faster then."""


class BestOfRows(NamedTuple):
    """What is known of [rows, head] logits."""

    columns: npt.NDArray[np.int32]
    """[rows, width], in falling order of logit; of equals the first."""
    values: npt.NDArray[np.float32]
    """[rows, width], their logits."""
    totals: npt.NDArray[np.float32]
    """[rows] log-sum-exp of the whole row; NaN where a logit is."""


def find_best(rows: npt.NDArray[np.float32], width: int) -> BestOfRows | None:
    """The `width` best of each row; None without our kernels, or if they do not take these."""
    kernels: Any = cpu_kernels()
    count, head = rows.shape
    if kernels is None or not 0 < width <= min(_MOST, head):
        return None
    if rows.dtype != np.float32 or rows.strides[1] != rows.itemsize:
        return None
    found = BestOfRows(
        np.empty((count, width), np.int32),
        np.empty((count, width), np.float32),
        np.empty(count, np.float32),
    )
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in found)
    kernels.best_of_rows(
        count, head, ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_long(rows.strides[0] // rows.itemsize), width, *pointers,
    )  # fmt: skip
    return found
