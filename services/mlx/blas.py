"""The matrix products under MLX on Linux.

MLX's Linux wheel links a reference BLAS at about 3 GFLOP/s. MKL loaded into the global
symbol namespace first takes its place, about five times faster. Products of a few rows, of
which decoding and verification consist, go to `small_gemm.c` instead, compiled once per
environment. On macOS nothing is needed.

Measured on the default target, one core, verification of 1 / 2 / 4 / 6 tokens:
MKL 50 / 60 / 93 / 113 ms, small_gemm 49 / 54 / 62 / 78 ms.
"""

import ctypes
import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("small_gemm.c")
_COMPILE_S = 60.0

_MOST_ROWS = 16
"""From here packing pays."""

_FEW_THREADS = 4
"""small_gemm has one thread; more than these make MKL the faster one for any rows."""


def load_blas(threads: int) -> None:
    """Load the libraries where MLX finds them; call before anything imports `mlx`."""
    if sys.platform != "linux":
        return
    libraries = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    if not libraries:
        _log.warning("MKL is not installed (extra 'cpu'); MLX's reference BLAS is 5 times slower")
        return
    # MLX's products resolve to whichever library is loaded first.
    small = _small_gemm() if threads <= _FEW_THREADS else None
    mkl = ctypes.CDLL(str(libraries[-1]), mode=ctypes.RTLD_GLOBAL)
    mkl.MKL_Set_Num_Threads(threads)
    if small is not None:
        # For a single row MKL's threads share the work.
        least = 1 if threads == 1 else 2
        small.small_gemm_take(ctypes.cast(mkl.cblas_sgemm, ctypes.c_void_p), least, _MOST_ROWS)


def _small_gemm() -> ctypes.CDLL | None:
    """The compiled kernel; None where it cannot be had, which costs speed only."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    library = Path(sys.prefix, "lib", f"libssd_small_gemm-{digest}.so")
    try:
        if not library.exists():
            _compile(library)
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("short drafts verify more slowly: no small_gemm kernel (%s)", error)
        return None


def _compile(library: Path) -> None:
    """Compile beside the library's place and move it there, as others may do the same now."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler `cc`")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, library.name)
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(built), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
        built.replace(library)
