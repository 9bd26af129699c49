"""Queries, keys and values of a few rows, taken apart, normed and rotated in one launch on CUDA.

From Python this is a dozen operations for each layer, three to five of them launches; a pass of a
small model is made of little else (docs/lab/cuda-forward.md). One warp serves one head of one row.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from services.mlx.cuda.kernel import LANES, build

SIZES = (64, 80, 96, 128, 256)
"""Of a head."""
_WARPS = 4

_BODY = """
const int head = blockIdx.x * WARPS + threadIdx.x / 32, row = blockIdx.y, rows = gridDim.y;
constexpr int ALL = HEADS + 2 * KV_HEADS;
if (head < ALL) {
  const T* from = x + (long(row) * ALL + head) * D;
  const float position = float(positions[row]);
  const T* gain = GAINS;
  if (head < HEADS) {
    rotate_head<T, D>(from, gain, EPS, speeds, ROTATED, position,
                      queries + (long(head) * rows + row) * D);
  } else if (head < HEADS + KV_HEADS) {
    rotate_head<T, D>(from, gain == nullptr ? nullptr : gain + D, EPS, speeds, ROTATED, position,
                      keys + (long(head - HEADS) * rows + row) * D);
  } else {
    rotate_head<T, D>(from, nullptr, 0.0f, speeds, 0, position,
                      values + (long(head - HEADS - KV_HEADS) * rows + row) * D);
  }
}
"""


class HeadNorm(NamedTuple):
    """The norm of queries and keys, head by head."""

    gains: mx.array
    """[2, size]."""
    eps: float


class Heads(NamedTuple):
    """What is known of a layer's attention before a pass."""

    heads: int
    kv_heads: int
    size: int
    """Of a head."""
    rotated: int
    """Numbers of a head that are rotated, the first ones."""
    speeds: mx.array
    """[rotated / 2] float32, radians a position."""
    norm: HeadNorm | None
    """Of queries and keys, if they have one."""


def rotate(x: mx.array, positions: mx.array, layer: Heads) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values, each [1, its heads, rows, size], of [1, rows, all heads * size].

    Args:
        x: queries, keys and values of each row side by side, in half precision.
        positions: [rows] int32.
        layer: what they are.
    """
    rows, heads = x.shape[1], layer.heads + 2 * layer.kv_heads
    inputs = {"x": x, "positions": positions, "speeds": layer.speeds}
    body = _BODY.replace("GAINS", "nullptr" if layer.norm is None else "gains")
    # A part of the kernel: MLX keeps a number by itself where the device waits to read it.
    body = body.replace("EPS", f"{0.0 if layer.norm is None else float(layer.norm.eps)!r}f")
    if layer.norm is not None:
        inputs["gains"] = layer.norm.gains
    outputs = {"queries": layer.heads, "keys": layer.kv_heads, "values": layer.kv_heads}
    make: Any = build(("rotate.cuh",), body, tuple(inputs), contiguous=True, outputs=tuple(outputs))
    found: tuple[mx.array, mx.array, mx.array] = tuple(
        make(
            inputs=list(inputs.values()),
            template=[
                ("T", x.dtype), ("D", layer.size), ("HEADS", layer.heads),
                ("KV_HEADS", layer.kv_heads), ("ROTATED", layer.rotated), ("WARPS", _WARPS),
            ],
            grid=(-(-heads // _WARPS) * _WARPS * LANES, rows, 1),
            threadgroup=(_WARPS * LANES, 1, 1),
            output_shapes=[(1, count, rows, layer.size) for count in outputs.values()],
            output_dtypes=[x.dtype] * len(outputs),
        )
    )  # fmt: skip
    return found
