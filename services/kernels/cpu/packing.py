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
_ROUNDED_GROUP, _FLOAT_BITS = 32, 16
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


def count_bytes(matrix: MatrixStruct) -> int:
    """Return the size of its strips."""
    kernels: Any = cpu_kernels()
    kernels.cpu_packed_bytes.restype = ctypes.c_size_t
    return int(kernels.cpu_packed_bytes(ctypes.byref(matrix)))


def check(weights: MlxWeights, bits: int = 0) -> MatrixStruct:
    """Return the matrix that `pack` makes of these weights, without its strips.

    Raises:
        Unfit: weights or scales are of another type.
    """
    numbers = _numbers_of(weights)
    outputs, inputs = weights.weight.shape
    stored = weights.bits or _FLOAT_BITS
    inputs = inputs * 32 // stored if weights.bits else inputs
    if 0 < bits < stored and inputs % _ROUNDED_GROUP == 0:
        kind = kinds.BITS4 if bits == 4 else kinds.BITS8
        return MatrixStruct(None, None, outputs, inputs, kind, kinds.HALF, _ROUNDED_GROUP)
    if weights.scales is None:
        return MatrixStruct(None, None, outputs, inputs, numbers, 0, 0)
    kind = kinds.BITS4 if weights.bits <= 4 else kinds.BITS8
    return MatrixStruct(None, None, outputs, inputs, kind, numbers, weights.group)


def _numbers_of(weights: MlxWeights) -> int:
    """Return the type of floats, or of scales and biases."""
    dtype = weights.weight.dtype if weights.scales is None else weights.scales.dtype
    if dtype not in _FLOATS or weights.weight.ndim != 2:
        raise Unfit(f"weights of {dtype} in {weights.weight.ndim} dimensions")
    return _FLOATS[dtype]


def pack(weights: MlxWeights, bias: mx.array | None = None, bits: int = 0) -> PackedMatrix:
    """Pack weights into strips, with all threads.

    Args:
        weights: as MLX stores them.
        bias: [outputs].
        bits: 4 or 8: round what has more, with a scale and a bias for 32 inputs. 0: keep all.

    Raises:
        Unfit: see `check`.
    """
    matrix = check(weights, bits)
    kernels: Any = cpu_kernels()
    arrays = [one for one in (weights.weight, weights.scales, weights.biases) if one is not None]
    mx.eval(arrays)
    views = [_contiguous(array) for array in arrays]
    pointers = [own.ctypes.data for own in views] + [None] * (3 - len(views))
    source = SourceStruct(*pointers, weights.bits, weights.group, _numbers_of(weights))
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
