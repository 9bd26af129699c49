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
    """Multiply [..., rows, inputs], normed if there is a norm, by [outputs, inputs] (`takes`).

    If gated, half as many outputs are silu(gate) * up, with the gate's weights first. `more`,
    [..., rows, outputs] or [outputs], is added.
    """
    inputs, outputs = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    rows = x.size // inputs
    tiles = next((count for count in _TILES if count * _TILE >= rows), _TILES[-1])
    groups, warps = _NARROW if tiles == 1 and not gated else _BROAD
    blocks = -(-outputs * (2 if gated else 1) // (groups * _GROUP)), -(-rows // (tiles * _TILE))
    arrays = {"x": x.reshape(1, rows, inputs), "w": weight}
    words = {"NORM": "nullptr, 0.0f", "MORE": "nullptr, 0"}
    if norm is not None:
        # A constant of the kernel: MLX keeps a single number where the device waits to read it.
        arrays["gain"], words["NORM"] = norm.gain, f"gain, {float(norm.eps)!r}f"
    if more is not None:
        arrays["more"], words["MORE"] = more, f"more, {0 if more.ndim == 1 else outputs}"
    body = re.sub(r"\b(NORM|MORE)\b", lambda word: words[word[0]], _BODY)
    make = build(("tile.cuh", "product.cuh"), body, tuple(arrays), contiguous=True)
    constants = {"TILES": tiles, "GROUPS": groups, "WARPS": warps, "GATED": gated}
    found: list[mx.array] = make(
        inputs=list(arrays.values()),
        template=[("T", x.dtype), *constants.items()],
        grid=(blocks[0] * warps * LANES, blocks[1], 1),
        threadgroup=(warps * LANES, 1, 1),
        output_shapes=[(*x.shape[:-1], outputs)],
        output_dtypes=[x.dtype],
    )
    return found[0]
