"""Where MLX and CUDA have their files, as their own environment variables say."""

import importlib.metadata
import os
import tempfile
from pathlib import Path

import mlx.core as mx

_PACKAGES = ("cu13", "cuda_runtime")
_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_USUAL = Path("/usr/local/cuda/include")


def find_kernels() -> Path:
    """Where MLX keeps what it has compiled."""
    if chosen := os.environ.get("MLX_PTX_CACHE_DIR"):
        return Path(chosen)
    return Path(tempfile.gettempdir(), "mlx", importlib.metadata.version("mlx"), "ptx")


def find_headers() -> Path:
    """The headers of CUDA: those beside MLX, else an installation's.

    Raises:
        OSError: there are none.
    """
    packages = Path(mx.__file__).parent.parent / "nvidia"
    beside = [packages / name / "include" for name in _PACKAGES]
    named = [Path(os.environ[name]) / "include" for name in _VARIABLES if name in os.environ]
    for folder in (*beside, *named, _USUAL):
        if (folder / "cuda_fp16.h").exists():
            return folder
    raise OSError("no headers of CUDA: set CUDA_HOME")
