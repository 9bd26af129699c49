"""The native libraries of a process that computes on a CPU under Linux.

MLX's Linux wheel links a reference BLAS at about 3 GFLOP/s. MKL, loaded into the global symbol
namespace first, replaces it and is about five times faster. Our kernels (`services.kernels.cpu`)
are compiled once per environment. On macOS nothing is needed.
"""

import ctypes
import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.kernels.cpu import build
from services.kernels.cpu.build import compile_library, sources

_log = logging.getLogger(__name__)


class _Loaded:
    """The libraries that `load_blas` has loaded into this process."""

    done = False
    kernels: ctypes.CDLL | None = None
    cores: tuple[int, ...] = ()
    """Cores of this process beyond its first, to which helper threads are pinned."""
    lent: ctypes.c_int | None = None
    """The flag that helper threads read, kept alive here."""


def load_blas(threads: int) -> None:
    """Load the libraries whose symbols MLX will resolve to; call before anything imports `mlx`.

    This happens once per process: further calls do nothing.
    """
    if sys.platform != "linux" or _Loaded.done:
        return
    _Loaded.done = True
    mkl = max(Path(sys.prefix, "lib").glob("libmkl_rt.so*"), default=None)
    # MLX's matrix products go to the library that is loaded first: ours, which calls MKL.
    kernels = _Loaded.kernels = _load_kernels(
        ctypes.RTLD_LOCAL if mkl is None else ctypes.RTLD_GLOBAL
    )
    if mkl is not None:
        blas = ctypes.CDLL(str(mkl), mode=ctypes.RTLD_GLOBAL)
        blas.MKL_Set_Num_Threads(threads)
        if kernels is not None:
            kernels.cpu_use_sgemm(ctypes.cast(blas.cblas_sgemm, ctypes.c_void_p))
    if kernels is not None:
        _Loaded.cores = tuple(sorted(os.sched_getaffinity(0))[1:threads])
        use_spare_cores(())


def cpu_kernels() -> ctypes.CDLL | None:
    """Return our kernels if this process computes with them."""
    return _Loaded.kernels


def use_spare_cores(cores: Sequence[int], lent: ctypes.c_int | None = None) -> int:
    """Share all work from now on among threads on these cores and this process's own.

    Returns the number of helper threads; 0 without our kernels. Results stay the same, bit for bit.
    A call costs a microsecond.

    Args:
        cores: the same ones in every call, or none.
        lent: if given, they are used only while it is nonzero; it may change at any time.
    """
    if _Loaded.kernels is None:
        return 0
    if lent is not None:
        _Loaded.lent = lent
    helpers = (*_Loaded.cores, *cores)
    cores_to_pin = (ctypes.c_int * max(1, len(helpers)))(*helpers)
    flag = None if lent is None else ctypes.byref(lent)
    count: int = _Loaded.kernels.set_helpers(len(helpers), cores_to_pin, len(_Loaded.cores), flag)
    return count


def view(array: Any) -> Any:
    """Return the memory of an array of MLX without a copy."""
    return np.asarray(memoryview(array))


def address(array: Any) -> ctypes.c_void_p:
    """Return the address of a numpy array's first element."""
    return ctypes.c_void_p(array.__array_interface__["data"][0])


def _load_kernels(mode: int) -> ctypes.CDLL | None:
    """Load the compiled kernels; None where they are unavailable, which costs speed and memory."""
    hashed_files = [*sources(), Path(build.__file__)]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in hashed_files)).hexdigest()
    library = Path(sys.prefix, "lib", f"libssd_cpu_kernels-{digest[:16]}.so")
    try:
        if not library.exists():
            compile_library(library)
        return ctypes.CDLL(str(library), mode=mode)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("models are computed by MLX, in floats: no CPU kernels (%s)", error)
        return None
