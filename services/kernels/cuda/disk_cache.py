"""Compiled kernels of ours on disk, where MLX looks for its own.

MLX compiles a custom kernel in every process anew, with all its own headers: 1 to 6 seconds each.
It looks up kernels of any kind in its disk cache, but stores only its own there (`JitModule` in
mlx/backend/cuda/jit_module.cpp). So ours are compiled here, without those headers, and put where
MLX looks. Nothing depends on it: kernels that are missing there are compiled by MLX.
"""

import functools
import importlib
import importlib.metadata
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from protocol.process.files import write_atomically

_log = logging.getLogger(__name__)

_MLX_HEADERS = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""
_BEGIN = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n__global__ void "
_OWN_BEGIN = 'namespace mlx::core::cu {\n\nextern "C" __global__ void '
"""The beginning without a mangled name."""
_END = "\n}\n\n} // namespace mlx::core::cu\n"
OWN_HEADERS = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace mlx::core::cu {
using int32_t = int;
using uint32_t = unsigned;
struct Shape {
  int at[10];
  __device__ int operator[](int axis) const { return at[axis]; }
};
struct Strides {
  long long at[10];
  __device__ long long operator[](int axis) const { return at[axis]; }
};
}
"""
"""Replaces MLX's headers: the parts our kernels use, with the same layout."""
_TYPES = {
    mx.bool_: ("bool", "bool"),
    mx.int32: ("int32_t", "int32_t"),
    mx.uint32: ("uint32_t", "uint32_t"),
    mx.float16: ("__half", "float16_t"),
    mx.bfloat16: ("__nv_bfloat16", "bfloat16_t"),
    mx.float32: ("float", "float"),
}
"""Types as kernel parameters and in kernel names."""
_PARTS = ("shape", "strides", "ndim")
_KINDS = {"shape": "Shape", "strides": "Strides", "ndim": "int"}
_MASK = (1 << 64) - 1
_FACTOR = 0xC6A4A7935BD1E995

Template = Sequence[tuple[str, Any]]


class KernelText(NamedTuple):
    """The text and names from which MLX builds a kernel."""

    name: str
    header: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def keep(
    text: KernelText, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype], template: Template
) -> None:
    """Compile this kernel to where MLX looks for it when it evaluates it on CUDA.

    Args:
        text: of the kernel.
        inputs: as in the call.
        outputs: their types.
        template: constants of the kernel, by name.
    """
    try:
        _keep(text, inputs, outputs, template)
    # On any error MLX compiles it itself.
    except Exception as error:  # noqa: BLE001
        _warn(str(error))


def _keep(
    text: KernelText, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype], template: Template
) -> None:
    name = name_function(text, template)
    rest = write_function(text, name, inputs, outputs, template)
    module = f"{name}_{hash_text(_MLX_HEADERS + text.header + rest):x}"
    binary = _find_folder() / f"{module}.ptx"
    names = binary.with_suffix(".txt")
    if all(file.exists() and file.stat().st_size for file in (binary, names)):
        return
    own = rest.replace(_BEGIN, _OWN_BEGIN)
    compiled = _compile(OWN_HEADERS + text.header + own)
    binary.parent.mkdir(parents=True, exist_ok=True)
    # MLX looks for the binary, and then reads the kernel's name there.
    write_atomically(names, f"mlx::core::cu::{name}\t{name}\n", sync=True)
    write_atomically(binary, compiled, sync=True)


def _compile(source: str) -> bytes:
    """Return the binary of a kernel for the device that MLX computes on."""
    # In the extra `cuda`, and slow to import; most processes find their kernels on disk.
    core: Any = importlib.import_module("cuda.core")
    pathfinder: Any = importlib.import_module("cuda.pathfinder")
    headers = pathfinder.find_nvidia_header_directory("cudart")
    if headers is None:
        raise FileNotFoundError("there are no headers of CUDA: set CUDA_HOME")
    options = core.ProgramOptions(arch=find_architecture(), include_path=[str(headers)])
    binary: bytes = core.Program(source, "c++", options).compile("cubin").code
    return binary


def find_architecture() -> str:
    """Return the architecture that MLX compiles for, in NVIDIA's notation."""
    info = mx.device_info()
    major, minor = info["compute_capability_major"], info["compute_capability_minor"]
    return f"sm_{major}{minor}{'a' if int(major) >= 9 else ''}"


def _find_folder() -> Path:
    """Return the folder of MLX's compiled kernels."""
    if chosen := os.environ.get("MLX_PTX_CACHE_DIR"):
        return Path(chosen)
    return Path(tempfile.gettempdir(), "mlx", importlib.metadata.version("mlx"), "ptx")


@functools.cache
def _warn(reason: str) -> None:
    _log.warning("kernels are compiled at every start: %s", reason)


def name_function(text: KernelText, template: Template) -> str:
    """Return MLX's name for the kernel with these constants."""

    def name(value: Any) -> str:
        if isinstance(value, bool):
            return "t" if value else "f"
        return _TYPES[value][1] if isinstance(value, mx.Dtype) else str(value)

    return f"custom_kernel_{text.name}" + "".join(f"_{name(value)}" for _, value in template)


def write_function(
    text: KernelText,
    name: str,
    inputs: Sequence[mx.array],
    outputs: Sequence[mx.Dtype],
    template: Template,
) -> str:
    """Return exactly MLX's text of a kernel, after its headers."""
    parameters: list[str] = []
    for own, array in zip(text.inputs, inputs, strict=True):
        parameters.append(f"    const {_TYPES[array.dtype][0]}* {own}")
        parameters += [
            f"    const __grid_constant__ {_KINDS[part]} {own}_{part}"
            for part in _PARTS
            if array.ndim and f"{own}_{part}" in text.body
        ]
    for own, dtype in zip(text.outputs, outputs, strict=True):
        parameters.append(f"    {_TYPES[dtype][0]}* {own}")
    constants = "".join(_declare(own, value) for own, value in template)
    constants += "\n" if template else ""
    listed = ",\n".join(parameters)
    return f"{_BEGIN}{name}(\n{listed}) {{\n{constants}{text.body}{_END}"


def _declare(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {_TYPES[value][0]};\n"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"  constexpr {kind} {name} = {str(value).lower()};\n"


def hash_text(text: str) -> int:
    """Compute libstdc++'s `std::hash` of a string: MurmurHash64A (A. Appleby, public domain)."""
    data, whole = text.encode(), len(text.encode()) & ~7
    value = (0xC70F6907 ^ (len(data) * _FACTOR)) & _MASK
    for at in range(0, whole, 8):
        part = int.from_bytes(data[at : at + 8], "little") * _FACTOR & _MASK
        value = ((value ^ (part ^ part >> 47) * _FACTOR) * _FACTOR) & _MASK
    if whole < len(data):
        value = (value ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _MASK
    value = (value ^ value >> 47) * _FACTOR & _MASK
    return value ^ value >> 47
