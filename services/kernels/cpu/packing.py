"""Weights of MLX layers in the layout of the kernels (`c/layout.h`).

MLX's affine weights of 4 and 8 bits stay as they are in the file, number by number; those of 2 and
3 bits become 4 and those of 5 and 6 become 8, which changes no weight. Scales of ggml's K-quants,
which are floats in MLX's form, become bytes again. Floats stay what they are.
"""

import ctypes
import mmap
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from services.kernels.cpu import structures as kinds
from services.kernels.cpu.structures import MatrixStruct, SourceStruct
from services.mlx.array_memory import view
from services.mlx.blas import cpu_kernels
from services.mlx.patches import Unfit

_FLOATS = {mx.float16: kinds.HALF, mx.bfloat16: kinds.BFLOAT, mx.float32: kinds.FLOAT}
_GROUPS = (32, 64, 128)
_SHARING_GROUP, _SHARED_INPUTS = 32, 256
"""Of ggml's K-quants, whose scales are products of a byte and a half."""
_HUGE = 1 << 21


class PackedMatrix:
    """A weight [outputs, inputs] in strips, and a bias."""

    def __init__(self, matrix: MatrixStruct, held: tuple[Any, ...]) -> None:
        self.matrix = matrix
        self._held = held
        """Memory that the matrix points to."""

    @property
    def nbytes(self) -> int:
        """Of the strips."""
        return count_bytes(self.matrix)


class MlxWeights(NamedTuple):
    """A weight as MLX has it; scales and biases are None for floats."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group: int = 0

    def cut(self, first: int, end: int) -> "MlxWeights":
        """Return those of the outputs in [first, end)."""
        arrays = (None if array is None else array[first:end] for array in self[:3])
        weight, scales, biases = arrays
        if weight is None:
            raise ValueError("there are no weights")
        return self._replace(weight=weight, scales=scales, biases=biases)


def weights_of(layer: Any) -> MlxWeights:
    """Of a linear layer or an embedding.

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
    """Bytes of its strips."""
    kernels: Any = cpu_kernels()
    kernels.cpu_packed_bytes.restype = ctypes.c_size_t
    return int(kernels.cpu_packed_bytes(ctypes.byref(matrix)))


def check(weights: MlxWeights) -> MatrixStruct:
    """The matrix that `pack` makes of these, without its strips.

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
    """Bring weights into strips, by all threads.

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
    """Zeros at the beginning of a page; large ones on huge pages, where the system has them.

    Private, as systems give shared memory no huge pages.
    """
    room = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(room, np.uint8)


def _contiguous(array: mx.array) -> Any:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    own = view(array)
    return own if own.flags.c_contiguous else np.ascontiguousarray(own)
