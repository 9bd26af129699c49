"""Kernels written in CUDA, as MLX builds them."""

import functools
import hashlib
from pathlib import Path
from typing import Any

import mlx.core as mx

LANES = 32
"""Threads of a warp."""


@functools.cache
def build(text: str, body: str, inputs: tuple[str, ...], *, contiguous: bool) -> Any:
    """A kernel of this file's functions, whose inputs have their names in the body.

    It compiles when it is first evaluated.

    Args:
        text: name of the file.
        body: of the kernel; its output is `out`.
        inputs: their names.
        contiguous: whether inputs that lie otherwise are copied.
    """
    folder = Path(__file__).parent
    header = "\n".join((folder / name).read_text("utf-8") for name in ("common.cuh", text))
    # MLX keeps compiled kernels by their name, some versions of it across runs.
    digest = hashlib.sha256((header + body).encode()).hexdigest()[:12]
    make: Any = mx.fast.cuda_kernel
    return make(
        name=f"{Path(text).stem}_{digest}",
        input_names=list(inputs),
        output_names=["out"],
        source=body,
        header=header,
        ensure_row_contiguous=contiguous,
    )
