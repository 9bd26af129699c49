"""The product of 1 to 16 rows with quantised weights, on Metal.

MLX multiplies a few rows one by one: on an M4 Pro eight rows of a 4-bit product cost 2.7 times one.
Here each weight is unpacked once for all rows (`product.metal`), and every row is summed in the
same order for any number of rows, so that a token has the same bits in plain decoding and in a
verification.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from services.kernels.metal.kernel import LANES, build, launch

MOST_ROWS = 16
BITS = (4, 8)
GROUPS = (32, 64, 128)
TYPES = (mx.float16, mx.bfloat16)

_TILE = 8
"""Rows, and outputs, of one matrix."""
_MANY_OUTPUTS = 2048
_MANY_GROUPS = 32

_BODY = """
threadgroup float parts[SPLIT * TILES * BLOCKS * 64];
multiply<T, BITS, GROUP, TILES, BLOCKS, SPLIT>(
    x, w, scales, biases, x_shape[0], x_shape[1], w_shape[0],
    int(threadgroup_position_in_grid.x) * 8 * BLOCKS, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup, parts, out);
"""


class Quantised(NamedTuple):
    """Weights as `mx.quantize` packs them."""

    weight: mx.array
    """[outputs, inputs * bits / 32] uint32."""
    scales: mx.array
    """[outputs, inputs / group size], like biases."""
    biases: mx.array
    group_size: int
    bits: int


def weights_of(layer: Any) -> Quantised | None:
    """Return the weights of a quantised MLX layer, if the kernel supports them."""
    if getattr(layer, "mode", "affine") != "affine" or "biases" not in layer:
        return None
    own = Quantised(
        layer.weight, layer.scales, layer.biases, int(layer.group_size), int(layer.bits)
    )
    fits = (
        own.bits in BITS
        and own.group_size in GROUPS
        and own.weight.ndim == 2
        and own.weight.dtype == mx.uint32
        and own.weight.shape[0] % _TILE == 0
        and own.scales.dtype == own.biases.dtype
        and own.scales.dtype in TYPES
    )
    return own if fits else None


def takes(x: mx.array, weights: Quantised) -> bool:
    """Return True if these are few rows of the weights' own type."""
    return 0 < x.size <= MOST_ROWS * x.shape[-1] and x.dtype == weights.scales.dtype


def multiply(x: mx.array, weights: Quantised) -> mx.array:
    """Multiply [..., rows, inputs], which `takes` accepts: [..., rows, outputs]."""
    outputs, groups = weights.scales.shape
    inputs = groups * weights.group_size
    rows = x.size // inputs
    # It depends only on the weights' shape, since the order of a sum depends on it.
    split = 8 if groups >= _MANY_GROUPS else 4
    blocks = 4 if outputs >= _MANY_OUTPUTS else 2
    names = ("x", "w", "scales", "biases")
    found = launch(
        build("product.metal", _BODY, names, ("out",)),
        [x.reshape(rows, inputs), weights.weight, weights.scales, weights.biases],
        template={
            "T": x.dtype,
            "BITS": weights.bits,
            "GROUP": weights.group_size,
            "TILES": 1 if rows <= _TILE else 2,
            "BLOCKS": blocks,
            "SPLIT": split,
        },
        groups=(-(-outputs // (_TILE * blocks)), 1, 1),
        threads=split * LANES,
        outputs=[((rows, outputs), x.dtype)],
    )
    return found[0].reshape(*x.shape[:-1], outputs)
