"""Blocks of GGUF tensors in MLX's affine form: codes, and a scale and a bias for each group of 32.

A weight is `scale * code + bias`. Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K are of this form;
their codes are only put into MLX's order. Q2_K, Q3_K and Q6_K have a scale for each 16 weights,
so they become the nearest codes of eight bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Q = GGMLQuantizationType
_U = np.uint64

GROUP_SIZE = 32
NEAREST_BITS = 8


class AffineRows(NamedTuple):
    """Rows of weights in MLX's affine form."""

    codes: Bytes
    """[rows, columns * bits / 8]: MLX's words of 32 bits, as bytes."""
    scales: Floats
    """[rows, groups]."""
    biases: Floats
    """[rows, groups]."""


class Deviation(NamedTuple):
    """How far packed weights are from those of the file."""

    largest: float
    squares: float
    """Sum of the squared differences."""
    power: float
    """Sum of the squared weights."""


def pack(blocks: Bytes, kind: GGMLQuantizationType) -> tuple[AffineRows, Deviation]:
    """Rows of blocks in the affine form of `bits_of(kind)` bits.

    Args:
        blocks: [rows, bytes of a row], as in the file.
        kind: the type of the blocks.
    """
    exact = _EXACT.get(kind)
    if exact is None:
        return _nearest(blocks, kind)
    rows = len(blocks)
    codes, scales, biases = exact[1](blocks.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    packed = AffineRows(
        codes.reshape(rows, -1),
        scales.astype(np.float32).reshape(rows, -1),
        biases.astype(np.float32).reshape(rows, -1),
    )
    return packed, Deviation(0.0, 0.0, 0.0)


def bits_of(kind: GGMLQuantizationType) -> int:
    """Bits of a code."""
    return _EXACT[kind][0] if kind in _EXACT else NEAREST_BITS


def is_exact(kind: GGMLQuantizationType) -> bool:
    """Tell if every weight comes out as it is in the file."""
    return kind in _EXACT


def _nearest(blocks: Bytes, kind: GGMLQuantizationType) -> tuple[AffineRows, Deviation]:
    """Round to 256 steps between the least and the largest weight of each group."""
    weights = dequantize(blocks, kind)
    groups = weights.reshape(len(blocks), -1, GROUP_SIZE)
    low, high = groups.min(axis=2), groups.max(axis=2)
    # Rounded first: the codes then make up for it.
    scales = _half((high - low) / 255.0)
    biases = _half(low)
    steps = np.where(scales > 0, scales, 1.0)[..., None]
    above = groups - biases[..., None]
    codes = above / steps
    np.rint(codes, out=codes)
    np.clip(codes, 0, 255, out=codes)
    off = np.subtract(codes * scales[..., None], above, out=above)
    deviation = Deviation(
        max(float(off.max(initial=0.0)), -float(off.min(initial=0.0))),
        float(np.vdot(off, off)),
        float(np.vdot(weights, weights)),
    )
    return AffineRows(codes.astype(np.uint8).reshape(len(blocks), -1), scales, biases), deviation


def _half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _floats(blocks: Bytes, start: int) -> Floats:
    """The half-precision number at `start` of each block."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes) -> tuple[Bytes, Bytes]:
    """Pairs of low halves, and pairs of high halves, of neighbouring bytes."""
    pairs = np.ascontiguousarray(data).view(np.uint16)
    low = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    high = ((pairs >> 4) & 0x0F) | ((pairs >> 8) & 0xF0)
    return low.astype(np.uint8), high.astype(np.uint8)


def _five_bits(low: Bytes, fifth: npt.NDArray[Any]) -> Bytes:
    """Codes [n, 32] of five bits, eight in five bytes.

    Args:
        low: [n, 32], the low four bits.
        fifth: [n, 32], 0 or 1.
    """
    words = (low | (fifth << 4)).view(np.uint64)
    # Bytes of five bits become pairs of ten, fours of twenty, and eights of forty bits.
    words = (words & _U(0x001F001F001F001F)) | ((words & _U(0x1F001F001F001F00)) >> _U(3))
    words = (words & _U(0x000003FF000003FF)) | ((words & _U(0x03FF000003FF0000)) >> _U(6))
    words = (words & _U(0xFFFFF)) | ((words >> _U(12)) & _U(0xFFFFF00000))
    return np.ascontiguousarray(words.view(np.uint8).reshape(len(low), -1, 8)[..., :5])


def _q4_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scale = _floats(blocks, 0)
    return np.concatenate(_nibbles(blocks[:, 2:]), axis=1), scale, -8 * scale


def _q4_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    codes = np.concatenate(_nibbles(blocks[:, 4:]), axis=1)
    return codes, _floats(blocks, 0), _floats(blocks, 2)


def _q5(blocks: Bytes, start: int) -> Bytes:
    """Codes of blocks with 32 fifth bits at `start` and 32 halves of bytes behind them."""
    fifth = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    halves = blocks[:, start + 4 :]
    return _five_bits(np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=1), fifth)


def _q5_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scale = _floats(blocks, 0)
    return _q5(blocks, 2), scale, -16 * scale


def _q5_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _q5(blocks, 4), _floats(blocks, 0), _floats(blocks, 2)


def _q8_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scale = _floats(blocks, 0)
    return np.ascontiguousarray(blocks[:, 2:] ^ np.uint8(0x80)), scale, -128 * scale


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases [n, 8] of Q4_K and Q5_K: numbers of six bits times two floats."""
    s = blocks[:, 4:16]
    high = s[:, 8:]
    scale = np.concatenate([s[:, :4] & 63, (high & 15) | ((s[:, :4] >> 6) << 4)], axis=1)
    least = np.concatenate([s[:, 4:8] & 63, (high >> 4) | ((s[:, 4:8] >> 6) << 4)], axis=1)
    return _floats(blocks, 0) * scale, -(_floats(blocks, 2) * least)


def _q4_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    low, high = _nibbles(blocks[:, 16:])
    shape = (len(blocks), 4, 16)
    return np.stack([low.reshape(shape), high.reshape(shape)], axis=2), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    halves = blocks[:, 48:].reshape(-1, 4, 32)
    low = np.stack([halves & np.uint8(15), halves >> np.uint8(4)], axis=2).reshape(-1, 8, 32)
    # Bit g of byte i is the fifth bit of weight i of group g.
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2)
    return _five_bits(low.reshape(-1, 32), fifth.reshape(-1, 32)), *_k_scales(blocks)


_EXACT: dict[GGMLQuantizationType, tuple[int, Callable[[Bytes], tuple[Bytes, Floats, Floats]]]] = {
    Q.Q4_0: (4, _q4_0),
    Q.Q4_1: (4, _q4_1),
    Q.Q5_0: (5, _q5_0),
    Q.Q5_1: (5, _q5_1),
    Q.Q8_0: (8, _q8_0),
    Q.Q4_K: (4, _q4_k),
    Q.Q5_K: (5, _q5_k),
}
PACKED_KINDS = frozenset(_EXACT) | {Q.Q2_K, Q.Q3_K, Q.Q6_K}
FLOAT_KINDS = frozenset({Q.F32, Q.F16, Q.BF16})
