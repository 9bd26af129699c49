"""The BLAS under MLX on Linux.

MLX's Linux wheel links a reference BLAS at about 3 GFLOP/s. MKL loaded into the global
symbol namespace first takes its place, about five times faster. On macOS nothing is needed.
"""

import ctypes
import logging
import sys
from pathlib import Path

_log = logging.getLogger(__name__)


def load_blas(threads: int) -> None:
    """Load MKL where MLX needs it; call before anything imports `mlx`."""
    if sys.platform != "linux":
        return
    libraries = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    if not libraries:
        _log.warning("MKL is not installed (extra 'cpu'); MLX's reference BLAS is 5 times slower")
        return
    mkl = ctypes.CDLL(str(libraries[-1]), mode=ctypes.RTLD_GLOBAL)
    mkl.MKL_Set_Num_Threads(threads)
