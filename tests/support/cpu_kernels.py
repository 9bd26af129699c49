"""The CPU kernels called by themselves, without MLX."""

import ctypes
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.mlx import blas
from services.mlx.blas import WeightCopy

Floats = npt.NDArray[np.float32]
ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112


def load_own(folder: Path) -> ctypes.CDLL:
    """The kernels with a state of their own: a copy of the library in this folder."""
    loaded = blas.cpu_kernels()
    assert loaded is not None
    own = ctypes.CDLL(str(shutil.copy(loaded._name, folder / "kernels.so")))
    assert own.small_gemm_take(None, 1, 16) == 16
    return own


def contiguous_product(kernel: ctypes.CDLL, x: Floats, w: Floats) -> Floats:
    """0.5 * x @ w.T of the arrays as they lie."""
    (m, k), n = x.shape, w.shape[0]
    out = np.empty((m, n), np.float32)
    real, pointer = ctypes.c_float, ctypes.c_void_p
    kernel.cblas_sgemm(
        *(ROW_MAJOR, PLAIN, TRANSPOSED, m, n, k, real(0.5)),
        *(pointer(x.ctypes.data), k, pointer(w.ctypes.data), k),
        *(real(0.0), pointer(out.ctypes.data), n),
    )
    return out


def add_copy(kernel: ctypes.CDLL, w: Floats, copy: WeightCopy) -> bool:
    """What `blas.add_copy` does, for this kernel; the arrays must outlive its products."""
    arrays: tuple[npt.NDArray[Any], ...] = (w, copy.rows, copy.scales)
    weight, rows, scales = (ctypes.c_void_p(array.ctypes.data) for array in arrays)
    return bool(kernel.small_gemm_add_copy(weight, *w.shape, int(copy.kind), rows, scales))


def rounded_rows(x: Floats) -> npt.NDArray[np.float64]:
    """The rows of x as they are multiplied with tiles of bytes."""
    steps = np.abs(x).max(axis=1, keepdims=True).astype(np.float64) / 127
    return np.rint(x / np.where(steps > 0, steps, 1)) * steps
