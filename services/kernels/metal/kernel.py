"""Kernels written in Metal, as MLX builds and launches them."""

import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

LANES = 32
"""Threads of a simdgroup."""


@functools.cache
def build(text: str, body: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    """Build a kernel from this file's functions; inputs and outputs have their names in the body.

    It compiles when it is first evaluated. Inputs whose strides the body uses are passed as they
    are; others are made contiguous.
    """
    folder = Path(__file__).parent
    header = "\n".join((folder / name).read_text("utf-8") for name in ("common.metal", text))
    header = re.sub(r" *//.*", "", header)  # MLX scans it in every call
    # MLX caches compiled kernels by name, in some versions even across runs.
    digest = hashlib.sha256((header + body).encode()).hexdigest()[:12]
    make: Any = mx.fast.metal_kernel
    return make(
        name=f"{Path(text).stem}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=body,
        header=header,
        ensure_row_contiguous="_strides" not in body,
    )


def launch(
    kernel: Any,
    inputs: Sequence[mx.array],
    *,
    template: dict[str, Any],
    groups: tuple[int, int, int],
    threads: int,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> list[mx.array]:
    """Return the results of the kernel, lazily.

    Args:
        kernel: from `build`.
        inputs: in the order of their names.
        template: values of the body's parameters.
        groups: number of threadgroups along each axis.
        threads: of each threadgroup.
        outputs: shape and type of each.
    """
    found: list[mx.array] = kernel(
        inputs=list(inputs),
        template=list(template.items()),
        grid=(groups[0] * threads, groups[1], groups[2]),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )
    return found
