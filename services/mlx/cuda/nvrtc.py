"""NVIDIA's compiler at run time, as far as a kernel of ours needs it.

MLX loads the library; this calls what is there already, by its C interface. Documented in
NVIDIA's "NVRTC" (docs.nvidia.com/cuda/nvrtc).
"""

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from services.mlx.cuda.folders import find_headers


class Compiled(NamedTuple):
    """A kernel for one architecture."""

    binary: bytes
    symbol: str
    """Its name in the binary."""


def compile_kernel(source: str, name: str, architecture: str) -> Compiled:
    """The binary of the kernel of this name in its source.

    Raises:
        OSError: there is no compiler here, or it finds no headers of CUDA.
        RuntimeError: it does not compile.
    """
    library = _load()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None))
    try:
        _check(library.nvrtcAddNameExpression(program, name.encode()))
        options = [f"--gpu-architecture={architecture}", f"--include-path={find_headers()}"]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            raise RuntimeError(_read(library.nvrtcGetProgramLog, program).decode(errors="replace"))
        symbol = ctypes.c_char_p()
        _check(library.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(symbol)))
        found = symbol.value or b""
        return Compiled(_read(library.nvrtcGetCUBIN, program), found.decode())
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def find_architecture() -> str:
    """What MLX compiles for on its device, as the compiler calls it."""
    info = mx.device_info()
    major, minor = info["compute_capability_major"], info["compute_capability_minor"]
    return f"sm_{major}{minor}{'a' if int(major) >= 9 else ''}"


@functools.cache
def _load() -> Any:
    """The library that MLX has loaded."""
    with Path("/proc/self/maps").open() as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libnvrtc.so" in line}
    if not paths:
        raise OSError("MLX has not loaded NVIDIA's run-time compiler")
    return ctypes.CDLL(min(paths))


def _read(get: Any, program: ctypes.c_void_p) -> bytes:
    """What NVRTC gives as so many bytes, asked for by a function of this name and `Size`."""
    size = ctypes.c_size_t()
    _check(getattr(_load(), f"{get.__name__}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer))
    return buffer.raw


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"NVIDIA's run-time compiler failed ({result})")
