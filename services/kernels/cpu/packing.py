"""Weights of MLX layers in the layout of the kernels (`c/layout.h`).

MLX's affine weights of 4 and 8 bits keep the numbers of the file; those of 2 and 3 bits are widened
to 4 bits and those of 5 and 6 to 8, which changes no weight. Scales of ggml's K-quants, which MLX
holds as floats, become bytes again. Floating-point weights keep their type.
"""

import ctypes
import mmap
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from services.kernels.cpu import structures as kinds
from services.kernels.cpu.library import cpu_kernels, view
from services.kernels.cpu.structures import MatrixStruct, SourceStruct
from services.mlx.patches import Unfit

_FLOATS = {mx.float16: kinds.HALF, mx.bfloat16: kinds.BFLOAT, mx.float32: kinds.FLOAT}
_GROUPS = (32, 64, 128)
_SHARING_GROUP, _SHARED_INPUTS = 32, 256
"""Inputs per scale, and per shared factor, of ggml's K-quants.

A scale is the product of its own byte and a half-precision factor that eight groups share.
"""
_ROUNDED_GROUP = 32
_ROUNDED_ROWS = 1 << 14
"""Rows that are quantised at once: all of a large vocabulary would be half a gigabyte of floats."""
_LARGEST_HALF = 65504.0
_HUGE = 1 << 21
"""Size of a huge page."""


class PackedMatrix:
    """A weight [outputs, inputs] in strips, and a bias."""

    def __init__(self, matrix: MatrixStruct, held: tuple[Any, ...]) -> None:
        self.matrix = matrix
        self._held = held
        """Memory that the matrix points to."""

    @property
    def nbytes(self) -> int:
        """Size of the strips."""
        return count_bytes(self.matrix)


class MlxWeights(NamedTuple):
    """A weight as MLX stores it; scales and biases are None for floats."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group: int = 0

    def cut(self, first: int, end: int) -> "MlxWeights":
        """Return the weights of the outputs in [first, end)."""
        arrays = (None if array is None else array[first:end] for array in self[:3])
        weight, scales, biases = arrays
        if weight is None:
            raise ValueError("there are no weights")
        return self._replace(weight=weight, scales=scales, biases=biases)


def weights_of(layer: Any) -> MlxWeights:
    """Return the weights of a linear layer or an embedding.

    Raises:
        Unfit: it is of another kind.
    """
    if type(layer) in {nn.QuantizedLinear, nn.QuantizedEmbedding}:
        if layer.mode != "affine" or layer.group_size not in _GROUPS:
            raise Unfit(f"weights of mode {layer.mode!r} in groups of {layer.group_size}")
        return MlxWeights(layer.weight, layer.scales, layer.biases, layer.bits, layer.group_size)
    if type(layer) in {nn.Linear, nn.Embedding}:
        return MlxWeights(layer.weight)
    raise Unfit(f"a layer is a {type(layer).__name__}")


def quantise(weights: MlxWeights, bits: int) -> MlxWeights:
    """Round weights of more bits to `bits`, 4 or 8, with a scale and a bias for 32 inputs.

    Unfit sizes are returned as they are, and so are NaN and infinity: requests report them.
    """
    matrix = check(weights)
    if (weights.scales is not None and weights.bits <= bits) or matrix.inputs % _ROUNDED_GROUP:
        return weights
    pieces = []
    for first in range(0, matrix.outputs, _ROUNDED_ROWS):
        floats = _to_floats(weights.cut(first, first + _ROUNDED_ROWS))
        if not mx.all(mx.abs(floats) < _LARGEST_HALF).item():
            return weights
        codes, *factors = mx.quantize(floats, group_size=_ROUNDED_GROUP, bits=bits)
        pieces.append([codes, *(factor.astype(mx.float16) for factor in factors)])
        mx.eval(pieces[-1])
    codes, scales, biases = (mx.concatenate(list(parts)) for parts in zip(*pieces, strict=True))
    return MlxWeights(codes, scales, biases, bits, _ROUNDED_GROUP)


def _to_floats(weights: MlxWeights) -> mx.array:
    codes, scales, biases, bits, group = weights
    if scales is None:
        return codes.astype(mx.float32)
    return mx.dequantize(codes, scales, biases, group, bits).astype(mx.float32)


def count_bytes(matrix: MatrixStruct) -> int:
    """Return the size of its strips."""
    kernels: Any = cpu_kernels()
    kernels.cpu_packed_bytes.restype = ctypes.c_size_t
    return int(kernels.cpu_packed_bytes(ctypes.byref(matrix)))


def check(weights: MlxWeights) -> MatrixStruct:
    """Return the matrix that `pack` makes of these weights, without its strips.

    Raises:
        Unfit: weights or scales are of another type.
    """
    dtype = weights.weight.dtype if weights.scales is None else weights.scales.dtype
    if dtype not in _FLOATS or weights.weight.ndim != 2:
        raise Unfit(f"weights of {dtype} in {weights.weight.ndim} dimensions")
    outputs, inputs = weights.weight.shape
    if weights.scales is None:
        return MatrixStruct(None, None, outputs, inputs, _FLOATS[dtype], 0, 0)
    kind = kinds.BITS4 if weights.bits <= 4 else kinds.BITS8
    inputs = inputs * 32 // weights.bits
    return MatrixStruct(None, None, outputs, inputs, kind, _FLOATS[dtype], weights.group)


def pack(weights: MlxWeights, bias: mx.array | None = None) -> PackedMatrix:
    """Pack weights into strips, with all threads.

    Raises:
        Unfit: see `check`.
    """
    matrix = check(weights)
    kernels: Any = cpu_kernels()
    arrays = [one for one in (weights.weight, weights.scales, weights.biases) if one is not None]
    mx.eval(arrays)
    views = [_contiguous(array) for array in arrays]
    pointers = [own.ctypes.data for own in views]
    source = SourceStruct(*pointers, *[None] * (3 - len(pointers)), weights.bits)
    shared = matrix.scales == kinds.FLOAT and matrix.group == _SHARING_GROUP
    shared = shared and matrix.inputs % _SHARED_INPUTS == 0
    memory = None
    for scales in [kinds.SHARED, matrix.scales] if shared else [matrix.scales]:
        matrix.scales = scales
        memory = _allocate(count_bytes(matrix))
        matrix.strips = memory.ctypes.data
        if kernels.cpu_pack(ctypes.byref(matrix), ctypes.byref(source)):
            break
    held: tuple[Any, ...] = (memory,)
    if bias is not None:
        floats = np.array(bias.astype(mx.float32))
        matrix.bias, held = floats.ctypes.data, (memory, floats)
    return PackedMatrix(matrix, held)


def _allocate(size: int) -> Any:
    """Allocate zeros from a page's start on; if large, on huge pages where the system has them.

    The mapping is private: systems give shared memory no huge pages.
    """
    mapping = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def _contiguous(array: mx.array) -> Any:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    memory = view(array)
    return memory if memory.flags.c_contiguous else np.ascontiguousarray(memory)
