"""Queries, keys and values of a few rows, split, normed and rotated in one launch on CUDA.

From Python this is a dozen operations per layer, three to five of them launches, and dominates a
pass of a small model (docs/lab/cuda-forward.md). One warp serves one head of one row.
"""

import re
from typing import Any, NamedTuple

import mlx.core as mx

from services.kernels.cuda.kernel import LANES, build
from services.kernels.cuda.kv_rows import KVBuffers

SIZES = (64, 80, 96, 128, 256)
"""Supported head sizes."""
_WARPS = 4

_BODY = """
const int head = blockIdx.x * WARPS + threadIdx.x / 32, row = blockIdx.y, rows = gridDim.y;
constexpr int ALL = HEADS + 2 * KV_HEADS;
if (head < ALL) {
  const T* from = x + (long(row) * ALL + head) * D;
  const Angles angles{speeds, float(positions[row])};
  const T* gain = GAINS;
  if (head < HEADS) {
    rotate_head<T, D>(from, gain, EPS, ROTATED, angles,
                      queries + (long(head) * rows + row) * D);
  } else if (head < HEADS + KV_HEADS) {
    rotate_head<T, D>(from, gain == nullptr ? nullptr : gain + D, EPS, ROTATED, angles,
                      KEYS + (long(head - HEADS) * PLACE) * D);
  } else {
    rotate_head<T, D>(from, nullptr, 0.0f, 0, angles,
                      VALUES + (long(head - HEADS - KV_HEADS) * PLACE) * D);
  }
}
"""
_APART = {"KEYS": "keys", "VALUES": "values", "PLACE": "rows + row"}
_IN_PLACE = {
    "KEYS": "const_cast<T*>(all_k)",
    "VALUES": "const_cast<T*>(all_v)",
    "PLACE": "all_k_shape[2] + slots[row]",
}
"""Destinations of keys and values."""


class HeadNorm(NamedTuple):
    """The norm of queries and keys, head by head."""

    gains: mx.array
    """[2, size]."""
    eps: float


class Heads(NamedTuple):
    """Shape of a layer's attention, known before a pass."""

    heads: int
    kv_heads: int
    size: int
    """Dimension of a head."""
    rotated: int
    """Leading elements of a head that are rotated."""
    speeds: mx.array
    """[rotated / 2] float32, radians per position."""
    norm: HeadNorm | None
    """Norm of queries and keys, if any."""


def rotate(x: mx.array, positions: mx.array, layer: Heads) -> tuple[mx.array, mx.array, mx.array]:
    """Split [1, rows, all heads * size] into rotated queries and keys, and values.

    Each is [1, its heads, rows, size].

    Args:
        x: queries, keys and values of each row next to each other, in half precision.
        positions: [rows] int32.
        layer: their shapes.
    """
    outputs = {"queries": layer.heads, "keys": layer.kv_heads, "values": layer.kv_heads}
    shapes = {name: (1, count, x.shape[1], layer.size) for name, count in outputs.items()}
    queries, keys, values = _launch({"x": x, "positions": positions}, layer, _APART, shapes)
    return queries, keys, values


def rotate_into(x: mx.array, positions: mx.array, layer: Heads, into: KVBuffers) -> mx.array:
    """Return queries as from `rotate`, and write keys and values into their slots of the buffers.

    They are written once the queries are computed (see `kv_rows`).
    """
    inputs = {"x": x, "positions": positions}
    inputs |= {"all_k": into.keys, "all_v": into.values, "slots": into.slots}
    shapes = {"queries": (1, layer.heads, x.shape[1], layer.size)}
    [queries] = _launch(inputs, layer, _IN_PLACE, shapes)
    return queries


def _launch(
    inputs: dict[str, mx.array],
    layer: Heads,
    places: dict[str, str],
    shapes: dict[str, tuple[int, int, int, int]],
) -> list[mx.array]:
    """Run the kernel on x, one of the inputs; the outputs have these shapes."""
    x = inputs["x"]
    rows, heads = x.shape[1], layer.heads + 2 * layer.kv_heads
    inputs = {**inputs, "speeds": layer.speeds}
    # A constant of the kernel: MLX keeps a single number where the device waits to read it.
    eps = 0.0 if layer.norm is None else float(layer.norm.eps)
    words = {"GAINS": "nullptr" if layer.norm is None else "gains", "EPS": f"{eps!r}f", **places}
    body = re.sub("|".join(map(r"\b{}\b".format, words)), lambda word: words[word[0]], _BODY)
    if layer.norm is not None:
        inputs["gains"] = layer.norm.gains
    make: Any = build(("rotate.cuh",), body, tuple(inputs), contiguous=True, outputs=tuple(shapes))
    outputs: list[mx.array] = make(
        inputs=list(inputs.values()),
        template=[
            ("T", x.dtype), ("D", layer.size), ("HEADS", layer.heads),
            ("KV_HEADS", layer.kv_heads), ("ROTATED", layer.rotated), ("WARPS", _WARPS),
        ],
        grid=(-(-heads // _WARPS) * _WARPS * LANES, rows, 1),
        threadgroup=(_WARPS * LANES, 1, 1),
        output_shapes=list(shapes.values()),
        output_dtypes=[x.dtype] * len(shapes),
    )  # fmt: skip
    return outputs
