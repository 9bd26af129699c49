"""Kernels written in CUDA, as MLX builds them."""

import functools
import hashlib
from pathlib import Path
from typing import Any

import mlx.core as mx

LANES = 32
"""Threads of a warp."""


@functools.cache
def build(
    texts: tuple[str, ...],
    body: str,
    inputs: tuple[str, ...],
    *,
    contiguous: bool,
    outputs: tuple[str, ...] = ("out",),
) -> Any:
    """A kernel of these files' functions, whose inputs have their names in the body.

    It compiles when it is first evaluated.

    Args:
        texts: names of the files, each of which may use those before it.
        body: of the kernel.
        inputs: their names.
        contiguous: whether inputs that lie otherwise are copied.
        outputs: their names.
    """
    folder = Path(__file__).parent
    header = "\n".join((folder / name).read_text("utf-8") for name in ("common.cuh", *texts))
    # MLX keeps compiled kernels by their name, some versions of it across runs.
    digest = hashlib.sha256((header + body).encode()).hexdigest()[:12]
    make: Any = mx.fast.cuda_kernel
    return make(
        name=f"{Path(texts[-1]).stem}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=body,
        header=header,
        ensure_row_contiguous=contiguous,
    )
