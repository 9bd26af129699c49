"""Kernels for Metal as C++ on this machine: what stands in for `mx.fast.metal_kernel`.

The text that MLX would hand to Metal is put together in the same way, compiled with
`metal_host.h` in place of Metal's own headers, and run thread by thread. What only a GPU can
show: that Metal's compiler takes the text, and where its lanes hold a matrix.
"""

import ctypes
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

_DEADLINE_S = 300
_TYPES = {
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.uint32: "uint",
    mx.int32: "int",
    mx.bool_: "bool",
}
_ATTRIBUTES = {
    "threadgroup_position_in_grid": "uint3",
    "thread_position_in_grid": "uint3",
    "simdgroup_index_in_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
}
_RUN = """
extern "C" void run(void** a, int* const* shapes, const int64_t* const* strides,
                    const int* grid, const int* group) {
  const int threads = group[0] * group[1] * group[2];
  for (uint z = 0; z < uint(grid[2] / group[2]); z++)
    for (uint y = 0; y < uint(grid[1] / group[1]); y++)
      for (uint x = 0; x < uint(grid[0] / group[0]); x++)
        host::run_block(threads, [&](int at) {
          const uint tx = at % group[0], ty = at / group[0] % group[1],
                     tz = at / (group[0] * group[1]);
          kernel_body<TEMPLATE>(ARGUMENTS
              uint3{x, y, z}, uint3{x * group[0] + tx, y * group[1] + ty, z * group[2] + tz},
              uint(at / 32), uint(at % 32), uint(at));
        });
}
"""


class HostMetal:
    """Compiles kernels into a folder; `kernel` has the signature of `mx.fast.metal_kernel`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.launches: list[str] = []
        """Names of the kernels that were run."""

    def kernel(
        self,
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
    ) -> Callable[..., list[mx.array]]:
        """What `mx.fast.metal_kernel` gives."""

        def launch(
            *,
            inputs: Sequence[mx.array],
            template: Sequence[tuple[str, Any]],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: Sequence[tuple[int, ...]],
            output_dtypes: Sequence[mx.Dtype],
        ) -> list[mx.array]:
            assert all(g % t == 0 for g, t in zip(grid, threadgroup, strict=True))
            assert np.prod(threadgroup) <= 1024
            kinds = [one.dtype for one in inputs]
            text = _text(header, source, input_names, kinds, output_names, output_dtypes, template)
            given = [_to_numpy(one, gaps=not ensure_row_contiguous) for one in inputs]
            made = [_blank(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]
            self.launches.append(name)
            _call(_compiled(self._folder, text), [*given, *made], grid, threadgroup)
            return [_to_mlx(a, d) for a, d in zip(made, output_dtypes, strict=True)]

        return launch


def _text(  # noqa: PLR0917
    header: str,
    source: str,
    input_names: Sequence[str],
    kinds: Sequence[mx.Dtype],
    output_names: Sequence[str],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]],
) -> str:
    """One C++ file: the header, the body in a function as MLX declares it, and how it is run."""
    declared, passed = [], []
    for i, (name, dtype) in enumerate(zip(input_names, kinds, strict=True)):
        kind = _TYPES[dtype]
        declared += [f"const {kind}* {name}", f"const int* {name}_shape"]
        declared.append(f"const int64_t* {name}_strides")
        passed.append(f"(const {kind}*)a[{i}], shapes[{i}], strides[{i}],")
    for i, (name, dtype) in enumerate(zip(output_names, output_dtypes, strict=True)):
        declared.append(f"{_TYPES[dtype]}* {name}")
        passed.append(f"({_TYPES[dtype]}*)a[{len(kinds) + i}],")
    declared += [f"{kind} {name}" for name, kind in _ATTRIBUTES.items()]
    parameters = ", ".join(
        f"{'typename' if isinstance(value, mx.Dtype) else 'int'} {name}" for name, value in template
    )
    values = ", ".join(
        _TYPES[value] if isinstance(value, mx.Dtype) else str(value) for _, value in template
    )
    run = _RUN.replace("TEMPLATE", values).replace("ARGUMENTS", "\n".join(passed))
    return (
        f'#include "metal_host.h"\n{header}\n'
        "#undef threadgroup\n#define threadgroup static\n"  # only declarations are left
        f"template <{parameters}> void kernel_body({', '.join(declared)}) {{\n{source}\n}}\n{run}"
    )


def _compiled(folder: Path, text: str) -> ctypes.CDLL:
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _load(folder / f"kernel-{digest}", text)


@functools.cache
def _load(place: Path, text: str) -> ctypes.CDLL:
    compiler = shutil.which("c++")
    assert compiler is not None, "the tests need a C++ compiler, c++"
    place.with_suffix(".cpp").write_text(text)
    # Without contraction: two instances of one template must round alike, as Metal's do.
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas"]
    include = f"-I{Path(__file__).parent}"
    library = place.with_suffix(".so")
    subprocess.run(
        [compiler, *flags, include, "-o", library, place.with_suffix(".cpp")],
        check=True,
        timeout=_DEADLINE_S,
    )
    return ctypes.CDLL(str(library))


def _call(
    library: ctypes.CDLL,
    arrays: Sequence[npt.NDArray[Any]],
    grid: tuple[int, int, int],
    group: tuple[int, int, int],
) -> None:
    shapes = [np.array(a.shape, np.int32) for a in arrays]
    strides = [np.array(a.strides, np.int64) // a.itemsize for a in arrays]

    def pointers(owners: Sequence[npt.NDArray[Any]]) -> Any:
        return (ctypes.c_void_p * len(owners))(*(one.ctypes.data for one in owners))

    library.run(
        pointers(arrays),
        pointers(shapes),
        pointers(strides),
        (ctypes.c_int * 3)(*grid),
        (ctypes.c_int * 3)(*group),
    )


def _to_numpy(array: mx.array, *, gaps: bool) -> npt.NDArray[Any]:
    """Its elements' bits; with gaps, its rows lie apart, with NaN (or true) between them."""
    raw = array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array
    plain: npt.NDArray[Any] = np.array(raw)
    if not gaps or plain.ndim < 2:
        return plain
    wide = (*plain.shape[:-2], plain.shape[-2] + 3, plain.shape[-1])
    room = np.frombuffer(b"\xff" * (int(np.prod(wide)) * plain.itemsize), plain.dtype)
    spread = room.reshape(wide).copy()[..., : plain.shape[-2], :]
    spread[...] = plain
    return spread


def _blank(shape: Sequence[int], dtype: mx.Dtype) -> npt.NDArray[Any]:
    """Room for an output, full of what is no number."""
    size = int(np.prod(shape))
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.size]
    return np.full(size, np.iinfo(kind).max, kind).reshape(shape)


def _to_mlx(array: npt.NDArray[Any], dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(dtype)
