"""The CPU kernels under MLX on Linux: matrix products and attention.

MLX's Linux wheel links a reference BLAS at about 3 GFLOP/s. MKL, loaded into the global symbol
namespace first, replaces it and is about five times faster. Products of a few rows, the bulk of
decoding and verification, use `cpu/products/small_gemm.c` instead, and attention uses
`cpu/attention.c`; both are compiled once per environment. Without MKL (a CUDA installation whose
drafter may run on the CPU) they pass other products on to the reference BLAS. On macOS nothing is
needed.

Measured on the default target, one core, verification of 1 / 2 / 4 / 6 tokens: MKL 50 / 60 / 93 /
113 ms, small_gemm 49 / 54 / 62 / 78 ms. Weights that were published in few bits are read from
copies of that size (`services.mlx.exact_copies`), three times faster.
"""

import ctypes
import enum
import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from services.kernels.cpu import build
from services.kernels.cpu.build import compile_library, sources

_log = logging.getLogger(__name__)

_SOURCES = sorted(Path(__file__).with_name("cpu").rglob("*.[ch]"))

_MOST_ROWS = 16
"""From this many rows on, packing pays."""

_REFERENCE_BLAS = "mlx*.libs/libblas-*.so*"
_FEW_THREADS = 4
"""With more threads MKL is faster for any number of rows."""


BLOCK_SIZE = 32
"""Consecutive weights of a row that share a grid."""
TILED_ROWS = 4
"""Rows whose blocks, or groups of bytes, are interleaved."""


class WeightKind(enum.IntEnum):
    """How a copy stores its weights: `enum weight_kind` of `cpu/products/tiles.h`."""

    ROUNDED_INT8 = 1
    FOUR_BITS = 2
    EIGHT_BITS = 3
    BFLOAT16 = 4
    FLOAT16 = 5
    TILED_INT8 = 6


_BITS = dict(zip(WeightKind, (8, 4, 8, 16, 16, 8), strict=True))
_ON_A_GRID = (WeightKind.FOUR_BITS, WeightKind.EIGHT_BITS)


class WeightCopy(NamedTuple):
    """A copy of a weight [n, k]."""

    kind: WeightKind
    rows: npt.NDArray[np.generic]
    scales: npt.NDArray[np.float32]
    """For bytes, one factor per row; on a grid, step and minimum as [n / TILED_ROWS, k /
    BLOCK_SIZE, TILED_ROWS, 2].
    """

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.rows.nbytes + self.scales.nbytes


class _Loaded:
    """The libraries that `load_blas` has loaded into this process."""

    kernels: ctypes.CDLL | None = None
    cores: tuple[int, ...] = ()
    """Cores of this process beyond its first, to which helper threads are pinned."""
    lent: ctypes.c_int | None = None
    """The flag that helper threads read, kept alive here."""
    copies: ClassVar[dict[int, tuple[npt.NDArray[np.float32], WeightCopy]]] = {}
    """Weight address -> the arrays that the kernels read, kept alive here."""


def load_blas(threads: int) -> None:
    """Load the libraries that MLX will resolve to; call before anything imports `mlx`.

    This happens once per process: further calls do nothing.
    """
    if sys.platform != "linux" or _Loaded.kernels is not None:
        return
    mkl = _find_mkl()
    library = mkl or _find_reference_blas()
    if mkl is None and (library is None or library.parent.name.startswith("mlx_cpu")):
        _log.warning("MKL is not installed (extra 'cpu'): many products take five times as long")
    # MLX's products resolve to the library that is loaded first.
    kernels = _load_kernels() if library is not None and threads <= _FEW_THREADS else None
    if library is None or (mkl is None and kernels is None):
        return
    blas = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    if mkl is not None:
        # Our kernels split what they pass on to MKL among their own threads.
        blas.MKL_Set_Num_Threads(1 if kernels is not None else threads)
    if kernels is not None:
        kernels.small_gemm_take(ctypes.cast(blas.cblas_sgemm, ctypes.c_void_p), 1, _MOST_ROWS)
        _Loaded.kernels = kernels
        _Loaded.cores = tuple(sorted(os.sched_getaffinity(0))[1:threads])
        use_spare_cores(())


def _find_mkl() -> Path | None:
    return max(Path(sys.prefix, "lib").glob("libmkl_rt.so*"), default=None)


def _find_reference_blas() -> Path | None:
    """Return the path of the BLAS in MLX's wheel, without importing MLX."""
    spec = importlib.util.find_spec("mlx")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    libraries = [path for folder in folders for path in Path(folder).parent.glob(_REFERENCE_BLAS)]
    return max(libraries, default=None)


def cpu_kernels() -> ctypes.CDLL | None:
    """Return our kernels if this process computes with them."""
    return _Loaded.kernels


def multiplies_bytes() -> bool:
    """Return True if rows of bytes are multiplied by weights of bytes (`TILED_INT8`)."""
    return _Loaded.kernels is not None and bool(_Loaded.kernels.has_int8_rows())


def has_avx512() -> bool:
    """Return True if products of few rows process sixteen floats at once."""
    return _Loaded.kernels is not None and bool(_Loaded.kernels.small_gemm_has_avx512())


def pack_exactly(weight: npt.NDArray[np.float32], kind: WeightKind) -> WeightCopy | None:
    """Return a copy of this kind of weight [n, k]; None if it would not be exact, bit for bit."""
    if _Loaded.kernels is None or not weight.flags.c_contiguous:
        return None
    n, k = weight.shape
    tiles = -(-n // TILED_ROWS)
    packed = WeightCopy(
        kind,
        np.zeros(tiles * TILED_ROWS * k * _BITS[kind] // 8, np.uint8),
        np.zeros((tiles, k // BLOCK_SIZE, TILED_ROWS, 2) if kind in _ON_A_GRID else 0, np.float32),
    )
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (weight, *packed[1:])]
    same = _Loaded.kernels.exact_copy_pack(int(kind), pointers[0], n, k, *pointers[1:])
    return packed if same else None


def add_copy(weight: npt.NDArray[np.float32], copy: WeightCopy) -> bool:
    """Let products of few rows read the copy in place of `weight` [n, k].

    Both are kept alive; False without our kernels, or if their table is full.
    """
    if _Loaded.kernels is None or not weight.flags.c_contiguous:
        return False
    n, k = weight.shape
    kind, rows, scales = copy
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (weight, rows, scales)]
    if not _Loaded.kernels.small_gemm_add_copy(pointers[0], n, k, int(kind), *pointers[1:]):
        return False
    _Loaded.copies[weight.ctypes.data] = (weight, copy)
    return True


def find_copy(weight: npt.NDArray[np.float32]) -> WeightCopy | None:
    """Return the copy that products of few rows read in its place, if any."""
    _, copy = _Loaded.copies.get(weight.ctypes.data, (None, None))
    return copy


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
    given = (ctypes.c_int * max(1, len(helpers)))(*helpers)
    word = None if lent is None else ctypes.byref(lent)
    count: int = _Loaded.kernels.set_helpers(len(helpers), given, len(_Loaded.cores), word)
    return count


def _load_kernels() -> ctypes.CDLL | None:
    """Load the compiled kernels; None where they are unavailable, which costs only speed."""
    program = [*_SOURCES, *sources(), Path(build.__file__)]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in program)).hexdigest()
    library = Path(sys.prefix, "lib", f"libssd_cpu_kernels-{digest[:16]}.so")
    try:
        if not library.exists():
            compile_library(library, _SOURCES)
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("short drafts verify more slowly: no CPU kernels (%s)", error)
        return None
