"""The top few of each row of logits on CUDA, in one launch.

MLX sorts the whole row, or searches for the best and then for the next best, in a dozen launches,
which delays a drafter that needs branches after a chain, or runners-up at each depth. Here one
block serves a row: each thread keeps its best elements, and the best of all threads are then picked
in turn. It is used if it matches sorting, and is faster.
"""

import functools

import mlx.core as mx

from services.kernels.cuda.kernel import LANES, build
from services.mlx.selftest import check
from services.runtime.preparation import run_all

WIDTHS = (8, 16, 64)
"""Numbers of candidates with a kernel."""
_TYPES = (mx.float16, mx.bfloat16, mx.float32)
_WARPS = 32

_BODY = """
find_best<WIDTH, WARPS>(
    Row<T>{rows + blockIdx.x * rows_strides[0], long(rows_strides[1])}, rows_shape[1],
    out + blockIdx.x * (2 * WIDTH + 1));
"""


def find_best(rows: mx.array, width: int) -> mx.array | None:
    """Return [rows, 2 * n + 1] float32 with n >= `width`, or None where sorting is better.

    For each row, the n best columns in descending order, their logits, and the log-sum-exp.

    Args:
        rows: [rows, head] logits.
        width: requested columns; MLX finds a single best one.
    """
    count = next((count for count in WIDTHS if count >= width), 0)
    fits = rows.ndim == 2 and rows.dtype in _TYPES and 1 < width <= count <= rows.shape[1]
    return launch(rows, count) if fits and _works(rows.dtype, count) else None


def launch(rows: mx.array, width: int) -> mx.array:
    """Compute `find_best` by the kernel, for one of `WIDTHS`."""
    count = rows.shape[0]
    make = build(("sampling/best.cuh",), _BODY, ("rows",), contiguous=False)
    outputs: list[mx.array] = make(
        inputs=[rows],
        template=[("T", rows.dtype), ("WIDTH", width), ("WARPS", _WARPS)],
        grid=(count * _WARPS * LANES, 1, 1),
        threadgroup=(_WARPS * LANES, 1, 1),
        output_shapes=[(count, 2 * width + 1)],
        output_dtypes=[mx.float32],
    )
    return outputs[0]


def sort_best(rows: mx.array, width: int) -> mx.array:
    """Compute `find_best` with MLX's own operations, for exactly `width` columns."""
    rows = rows.astype(mx.float32)
    if width == 1:
        columns = mx.argmax(rows, axis=-1, keepdims=True)
    else:
        best = mx.argpartition(-rows, width - 1, axis=-1)[:, :width]
        values = mx.take_along_axis(rows, best, axis=-1)
        columns = mx.take_along_axis(best, mx.argsort(-values, axis=-1), axis=-1)
    logits = mx.take_along_axis(rows, columns, axis=-1)
    totals = mx.logsumexp(rows, axis=-1, keepdims=True)
    return mx.concatenate([columns.astype(mx.float32), logits, totals], axis=-1)


@functools.cache
def _works(dtype: mx.Dtype, width: int) -> bool:
    """Return True if the kernel compiles here, matches sorting, and is faster."""
    rows = mx.random.normal((3, 50000), key=mx.random.key(0)).astype(dtype)[:, :49152]
    # Equal logits may come in any order; their values are the same.
    usual, ours = (lambda find=find: find(rows, width)[:, width:] for find in (sort_best, launch))
    return run_all(check("the best of logits", "best logits", usual, ours)).faster
