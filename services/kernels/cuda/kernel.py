"""Kernels written in CUDA, as MLX builds them."""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from services.kernels.cuda import disk_cache

LANES = 32
"""Threads of a warp."""


class Kernel:
    """A kernel; each set of types and constants compiles on its first evaluation.

    Args:
        text: of the kernel.
        contiguous: True to copy non-contiguous inputs.
    """

    def __init__(self, text: disk_cache.KernelText, *, contiguous: bool) -> None:
        self._text = text
        make: Any = mx.fast.cuda_kernel
        self._call = make(
            name=text.name,
            input_names=list(text.inputs),
            output_names=list(text.outputs),
            source=text.body,
            header=text.header,
            ensure_row_contiguous=contiguous,
        )
        self._kept = set[Any]()

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: disk_cache.Template,
        output_dtypes: Sequence[mx.Dtype],
        **more: Any,
    ) -> list[mx.array]:
        """Return the outputs, lazy; see `mx.fast.cuda_kernel`."""
        types = tuple((array.dtype, array.ndim) for array in inputs)
        key = types, tuple(template), tuple(output_dtypes)
        if key not in self._kept:
            self._kept.add(key)
            disk_cache.keep(self._text, inputs, output_dtypes, template)
        outputs: list[mx.array] = self._call(
            inputs=list(inputs), template=list(template), output_dtypes=list(output_dtypes), **more
        )
        return outputs


@functools.cache
def build(
    texts: tuple[str, ...],
    body: str,
    inputs: tuple[str, ...],
    *,
    contiguous: bool,
    outputs: tuple[str, ...] = ("out",),
) -> Kernel:
    """Build a kernel from the functions in these files; its inputs have their names in the body.

    Args:
        texts: names of the files, each of which may use those before it.
        body: of the kernel.
        inputs: their names.
        contiguous: True to copy non-contiguous inputs.
        outputs: their names.
    """
    folder = Path(__file__).parent
    # MLX caches compiled kernels by their text; a machine compiles for its own GPU only.
    parts = [f"// {disk_cache.find_architecture()}"]
    parts += ((folder / name).read_text("utf-8") for name in ("common.cuh", *texts))
    header = "\n".join(parts)
    whole = header + body + disk_cache.OWN_HEADERS
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    name = f"{Path(texts[-1]).stem}_{digest}"
    text = disk_cache.KernelText(name, header, body, inputs, outputs)
    return Kernel(text, contiguous=contiguous)
