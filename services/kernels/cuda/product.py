"""The product of a few rows with weights in half precision, on CUDA.

A product of several rows goes through cuBLASLt, which costs the host 30 microseconds, and one of a
single row through a kernel of MLX's, which costs it 3: for small models a verification of four
tokens takes 1.5 times as long as a token (docs/lab/cuda-forward.md). Here one kernel serves one row
and many: each weight is read once, and tensor cores multiply it with eight rows at a time, used or
not. So a row has the same bits in any batch.

A call from Python costs more than it saves, since MLX builds the kernel's source anew for it; a
replay of a trace (`services.engine.traced_forward`) does not.
"""

import re
from typing import NamedTuple

import mlx.core as mx

from services.kernels.cuda.kernel import LANES, build

TYPES = (mx.float16, mx.bfloat16)
_TILE = 8
"""Rows that a tensor core multiplies at once."""
_TILES = (1, 2, 4)
"""Tiles of rows of a block."""
_GROUP = 16
"""Outputs that a warp computes at once."""
_RUN = 8
"""Inputs that a lane reads at once."""
_NARROW, _BROAD = (1, 8), (2, 4)
"""Groups of outputs, and warps, of a block: many small blocks for one tile of rows, otherwise
fewer, so that each row that is read serves more outputs. A gated block always has two groups.
"""

_BODY = """
multiply_rows<T, TILES, GROUPS, WARPS, GATED>(
    x, w, Norm<T>{NORM}, More<T>{MORE}, x_shape[1], x_shape[2], w_shape[0] / (GATED ? 2 : 1),
    blockIdx.y * TILES * 8, blockIdx.x * GROUPS * (GATED ? 8 : 16), out);
"""

_NORM_BODY = """
norm_rows<T, WARPS>(x, Norm<T>{NORM}, x_shape[1], x_shape[2], blockIdx.x * WARPS, out);
"""
_NORM_WARPS = 4


class Norm(NamedTuple):
    """The RMS norm of rows before they are multiplied."""

    gain: mx.array
    """[inputs], of the rows' type."""
    eps: float


def takes(x: mx.array, weight: mx.array) -> bool:
    """Return True if the kernel multiplies arrays of this kind."""
    return x.dtype == weight.dtype and weight.dtype in TYPES and weight.shape[1] % _RUN == 0


def multiply(
    x: mx.array,
    weight: mx.array,
    *,
    norm: Norm | None = None,
    more: mx.array | None = None,
    gated: bool = False,
) -> mx.array:
    """Multiply [..., rows, inputs] by [outputs, inputs]; see `takes`.

    Args:
        x: the rows.
        weight: if gated, of the gate's outputs and then as many more.
        norm: the rows are normed before, many of them by a launch of its own: otherwise each block
            would norm all of them.
        more: [..., rows, outputs] or [outputs], added to the result.
        gated: True for silu(gate) * up, half as many outputs.
    """
    inputs = weight.shape[1]
    outputs = weight.shape[0] // (2 if gated else 1)
    rows = x.size // inputs
    tiles = next((count for count in _TILES if count * _TILE >= rows), _TILES[-1])
    groups, warps = _NARROW if tiles == 1 and not gated else _BROAD
    written = groups * _GROUP // (2 if gated else 1)
    blocks = -(-outputs // written), -(-rows // (tiles * _TILE))
    shape, x = x.shape[:-1], x.reshape(1, rows, inputs)
    if norm is not None and tiles > 1:
        x, norm = norm_rows(x, norm), None
    arrays, words = {"x": x, "w": weight}, {"NORM": "nullptr, 0.0f", "MORE": "nullptr, 0"}
    if norm is not None:
        arrays["gain"], words["NORM"] = norm.gain, _write(norm)
    if more is not None:
        arrays["more"], words["MORE"] = more, f"more, {0 if more.ndim == 1 else outputs}"
    body = re.sub("|".join(map(r"\b{}\b".format, words)), lambda word: words[word[0]], _BODY)
    template = [("TILES", tiles), ("GROUPS", groups), ("WARPS", warps), ("GATED", gated)]
    return _launch(body, arrays, template, blocks, outputs).reshape(*shape, outputs)


def norm_rows(x: mx.array, norm: Norm) -> mx.array:
    """Norm [1, rows, inputs], with the bits that `multiply` uses."""
    body, blocks = _NORM_BODY.replace("NORM", _write(norm)), (-(-x.shape[1] // _NORM_WARPS), 1)
    arrays = {"x": x, "gain": norm.gain}
    return _launch(body, arrays, [("WARPS", _NORM_WARPS)], blocks, x.shape[2])


def _write(norm: Norm) -> str:
    # A constant of the kernel: MLX keeps a single number where the device waits to read it.
    return f"gain, {float(norm.eps)!r}f"


def _launch(
    body: str,
    arrays: dict[str, mx.array],
    template: list[tuple[str, int]],
    blocks: tuple[int, int],
    outputs: int,
) -> mx.array:
    """Launch this kernel over `x`, one of the arrays; the result has as many rows."""
    x, warps = arrays["x"], dict(template)["WARPS"]
    make = build(("tile.cuh", "product.cuh"), body, tuple(arrays), contiguous=True)
    found: list[mx.array] = make(
        inputs=list(arrays.values()),
        template=[("T", x.dtype), *template],
        grid=(blocks[0] * warps * LANES, blocks[1], 1),
        threadgroup=(warps * LANES, 1, 1),
        output_shapes=[(1, x.shape[1], outputs)],
        output_dtypes=[x.dtype],
    )
    return found[0]
