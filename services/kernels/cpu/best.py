"""The top few of each row of logits on the CPU, by `c/best.c`."""

import ctypes
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from services.kernels.cpu.library import cpu_kernels

_MOST = 256
"""Largest supported width; larger ones are rare, and sorting is faster for them."""


class BestOfRows(NamedTuple):
    """The result for [rows, head] logits."""

    columns: npt.NDArray[np.int32]
    """[rows, width], in descending order of logit; ties in column order."""
    values: npt.NDArray[np.float32]
    """[rows, width], their logits."""
    totals: npt.NDArray[np.float32]
    """[rows] log-sum-exp of the whole row; NaN if any logit is NaN."""


def find_best(rows: npt.NDArray[np.float32], width: int) -> BestOfRows | None:
    """Return the `width` best of each row; None without our kernels, or if unsupported."""
    kernels: Any = cpu_kernels()
    count, head = rows.shape
    if kernels is None or not 0 < width <= min(_MOST, head):
        return None
    if rows.dtype != np.float32 or rows.strides[1] != rows.itemsize:
        return None
    best = BestOfRows(
        np.empty((count, width), np.int32),
        np.empty((count, width), np.float32),
        np.empty(count, np.float32),
    )
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in best)
    kernels.best_of_rows(
        count, head, ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_long(rows.strides[0] // rows.itemsize), width, *pointers,
    )  # fmt: skip
    return best
