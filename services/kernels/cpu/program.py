"""The instruction set that this process computes with, and its products."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.kernels.cpu.library import address, cpu_kernels
from services.kernels.cpu.packing import PackedMatrix

Floats = npt.NDArray[np.float32]

SETS = ("avx512", "avxvnni", "avx2", "neon", "portable")


def find_program(name: str | None = None) -> ctypes.c_void_p | None:
    """The kernels of this instruction set, or of the fastest; None where there are none."""
    library: Any = cpu_kernels()
    if library is None:
        return None
    library.cpu_kernels_of.restype = ctypes.c_void_p
    found = library.cpu_kernels_of(None if name is None else name.encode())
    return None if found is None else ctypes.c_void_p(found)


def name_of(program: ctypes.c_void_p) -> str:
    """Of its instruction set."""
    library: Any = cpu_kernels()
    library.cpu_name_of.restype = ctypes.c_char_p
    return str(library.cpu_name_of(program).decode())


def multiply(program: ctypes.c_void_p, packed: PackedMatrix, x: Floats, *, rounds: bool) -> Floats:
    """[rows, outputs] of x [rows, inputs]; `rounds`: to bytes, for weights of bits."""
    library: Any = cpu_kernels()
    rows = np.ascontiguousarray(x, np.float32)
    out = np.empty((len(rows), packed.matrix.outputs), np.float32)
    library.cpu_multiply(
        program, ctypes.byref(packed.matrix), len(rows), address(rows), int(rounds), address(out)
    )
    return out


def read_rows(program: ctypes.c_void_p, packed: PackedMatrix, rows: Sequence[int]) -> Floats:
    """[rows, inputs] of a weight, as floats."""
    library: Any = cpu_kernels()
    out = np.empty((len(rows), packed.matrix.inputs), np.float32)
    numbers = (ctypes.c_int * len(rows))(*rows)
    library.cpu_read_rows(program, ctypes.byref(packed.matrix), len(rows), numbers, address(out))
    return out
