"""The product of a few rows with weights in half precision, on CUDA.

A product of several rows goes through cuBLASLt, which costs the host 30 microseconds, and one
of a single row through a kernel of MLX's, which costs it 3: for small models a verification of
four tokens takes half as much again as a token (docs/lab/cuda-forward.md). Here every row is
summed as MLX sums a single one, and each weight is read once for up to eight of them.

A call from Python costs more than it saves, since MLX builds the kernel's source anew for it;
a replay of a trace (`services.mlx.traced_forward`) does not.
"""

import mlx.core as mx

from services.mlx.cuda.kernel import LANES, build

TYPES = (mx.float16, mx.bfloat16)
_WARPS = 8
"""Of a block."""
_ROWS = (2, 4, 8)
"""That a warp multiplies."""
_OUTPUTS = ((8192, 4), (4096, 2), (0, 1))
"""(from so many outputs on, so many for each warp): enough warps to keep the device busy."""
_RUNS = (4, 2, 1)
"""Numbers that a lane reads at once: as MLX's kernel for a single row, and so in its order."""

_BODY = """
multiply_rows<T, ROWS, OUTPUTS, RUN>(
    x, w, x_shape[0], x_shape[1], w_shape[0], blockIdx.y * ROWS,
    (blockIdx.x * WARPS + threadIdx.x / 32) * OUTPUTS, out);
"""


def multiply(x: mx.array, weight: mx.array) -> mx.array:
    """[..., rows, outputs] of [..., rows, inputs] and [outputs, inputs], of one of `TYPES`."""
    outputs, inputs = weight.shape
    rows = x.size // inputs
    at_once = next((count for count in _ROWS if count >= rows), _ROWS[-1])
    own = next(count for least, count in _OUTPUTS if outputs >= least)
    run = next(count for count in _RUNS if inputs % (LANES * count) == 0 or count == 1)
    blocks = -(-outputs // (_WARPS * own)), -(-rows // at_once)
    found: list[mx.array] = build("product.cuh", _BODY, ("x", "w"), contiguous=True)(
        inputs=[x.reshape(rows, inputs), weight],
        template=[
            ("T", x.dtype), ("ROWS", at_once), ("OUTPUTS", own), ("RUN", run), ("WARPS", _WARPS)
        ],
        grid=(blocks[0] * _WARPS * LANES, blocks[1], 1),
        threadgroup=(_WARPS * LANES, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
    )  # fmt: skip
    return found[0].reshape(*x.shape[:-1], outputs)
