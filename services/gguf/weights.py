"""The weights of a GGUF file as one safetensors file, written in chunks by a few threads.

The file's size is reserved first, so a full disk shows at once; a chunk is half a million
weights, so neither the source nor the result is ever in memory.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize

from protocol.errors import ModelError
from services.gguf.architectures import half_split
from services.gguf.blocks import (
    FLOAT_KINDS,
    GROUP_SIZE,
    PACKED_KINDS,
    Deviation,
    bits_of,
    is_exact,
    pack,
)
from services.gguf.file import shape_of

_CHUNK = 1 << 19
"""Weights that a thread holds as floats at a time: few enough for its cache."""
_THREADS = 4

_NAMES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
Array = npt.NDArray[Any]


@dataclass
class Output:
    """One array of the safetensors file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    row_bytes: int
    start: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass
class Plan:
    """A tensor of the file and what becomes of it."""

    tensor: ReaderTensor
    name: str
    """Of the weight, in mlx-lm's words."""
    rows: int
    heads: int
    shift: float
    packed: bool
    dtype: np.dtype[Any] | None
    """Of floats; None: as they are in the file."""
    outputs: list[Output] = field(default_factory=list)

    @property
    def bits(self) -> int:
        """Of a packed weight's codes."""
        return bits_of(self.tensor.tensor_type)


def plan_tensor(
    tensor: ReaderTensor, name: str, *, heads: int, shift: float, unit: str, dense: bool
) -> Plan:
    """Decide what becomes of a tensor.

    Args:
        tensor: of the GGUF file.
        name: what mlx-lm calls it.
        heads: whose rows are reordered (`architectures.heads_of`); 0 if they are not.
        shift: what is subtracted from each weight.
        unit: where the model will be computed: "cpu", "metal" or "cuda".
        dense: whether quantised weights become floats.

    Raises:
        ModelError: its type or its shape cannot be converted.
    """
    kind, shape = tensor.tensor_type, shape_of(tensor)
    _check_shape(tensor, heads)
    packed = kind in PACKED_KINDS and not dense
    rows = math.prod(shape[:-1])
    dtype = _float_type(kind, unit, dense=dense)
    if packed:
        dtype = np.dtype(np.float32 if unit == "cpu" and is_exact(kind) else np.float16)
    plan = Plan(tensor, name, rows, heads, shift, packed, dtype)
    called, size = ("BF16", 2) if dtype is None else (_NAMES[dtype], dtype.itemsize)
    if not packed:
        plan.outputs = [Output(name, shape, called, size * shape[-1])]
        return plan
    width, groups = shape[-1] * plan.bits // 32, shape[-1] // GROUP_SIZE
    layer = name.removesuffix(".weight")
    plan.outputs = [Output(name, (*shape[:-1], width), "U32", 4 * width)]
    plan.outputs += [
        Output(f"{layer}.{part}", (*shape[:-1], groups), called, size * groups)
        for part in ("scales", "biases")
    ]
    return plan


def _check_shape(tensor: ReaderTensor, heads: int) -> None:
    kind, shape = tensor.tensor_type, shape_of(tensor)
    if kind not in PACKED_KINDS and kind not in FLOAT_KINDS:
        raise ModelError(
            f"the tensor {tensor.name!r} is of the type {kind.name}, which cannot be converted"
        )
    if kind in PACKED_KINDS and (len(shape) < 2 or shape[-1] % GROUP_SIZE):
        raise ModelError(f"the tensor {tensor.name!r} is of type {kind.name} and shape {shape}")
    if heads and (shape[0] % (2 * heads) or len(shape) > 2):
        raise ModelError(f"the tensor {tensor.name!r} of shape {shape} is not of {heads} heads")


def _float_type(kind: GGMLQuantizationType, unit: str, *, dense: bool) -> np.dtype[Any] | None:
    """The type of floats; None is bfloat16, as it is in the file."""
    if kind == GGMLQuantizationType.BF16 and not dense:
        return None
    if unit != "cpu" or (kind == GGMLQuantizationType.F16 and not dense):
        return np.dtype(np.float16)
    return np.dtype(np.float32)


class _Files(NamedTuple):
    """Where rows are read and written, as descriptors."""

    source: int
    result: int
    start: int
    """Of the data in the result."""


def write_weights(plans: list[Plan], source: Path, path: Path) -> dict[str, Deviation]:
    """Write the safetensors file `path`; returns how far off each tensor is.

    Raises:
        ModelError: weights are not finite, or the source has become shorter.
        OSError: the disk is full.
    """
    header, offset = {}, 0
    for output in (output for plan in plans for output in plan.outputs):
        output.start, offset = offset, offset + output.size
        header[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [output.start, offset],
        }
    text = json.dumps({"__metadata__": {"format": "mlx"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    reading = os.open(source, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, 8 + len(text) + offset)
        _write_all(descriptor, struct.pack("<Q", len(text)) + text, 0)
        return _write_tensors(plans, _Files(reading, descriptor, 8 + len(text)))
    finally:
        os.close(descriptor)
        os.close(reading)


def _write_tensors(plans: list[Plan], files: _Files) -> dict[str, Deviation]:
    found: dict[str, list[Deviation]] = {}
    waiting: set[Future[tuple[str, Deviation]]] = set()
    with ThreadPoolExecutor(_THREADS) as threads:
        for plan, first, last in _chunks(plans):
            if len(waiting) >= 2 * _THREADS:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                _collect(done, found)
            waiting.add(threads.submit(_convert_rows, plan, first, last, files))
        _collect(waiting, found)
    return {
        name: Deviation(
            max(one.largest for one in parts),
            sum(one.squares for one in parts),
            sum(one.power for one in parts),
        )
        for name, parts in found.items()
    }


def _collect(
    done: Iterable[Future[tuple[str, Deviation]]], found: dict[str, list[Deviation]]
) -> None:
    for future in done:
        name, deviation = future.result()
        found.setdefault(name, []).append(deviation)


def _chunks(plans: list[Plan]) -> Iterator[tuple[Plan, int, int]]:
    """Rows of tensors, half a million weights at a time; what has heads goes as a whole."""
    for plan in plans:
        columns = shape_of(plan.tensor)[-1]
        step = plan.rows if plan.heads else max(1, _CHUNK // columns)
        for first in range(0, plan.rows, step):
            yield plan, first, min(plan.rows, first + step)


def _convert_rows(plan: Plan, first: int, last: int, files: _Files) -> tuple[str, Deviation]:
    tensor = plan.tensor
    rows = _read_rows(plan, first, last, files.source)
    deviation = Deviation(0.0, 0.0, 0.0)
    if plan.packed:
        packed, deviation = pack(rows, tensor.tensor_type)
        parts: list[Array] = [
            packed.codes,
            packed.scales.astype(plan.dtype),
            packed.biases.astype(plan.dtype),
        ]
        if not all(np.isfinite(part).all() for part in parts[1:]):
            raise ModelError(f"the tensor {tensor.name!r} has weights that are not finite")
    else:
        parts = [_as_floats(rows, plan)]
    for part, output in zip(parts, plan.outputs, strict=True):
        # A vector (a bias) is one row here, and its elements are the rows of heads.
        ordered = half_split(part.reshape(-1, 1) if plan.rows == 1 else part, plan.heads)
        _write_all(
            files.result, ordered.tobytes(), files.start + output.start + first * output.row_bytes
        )
    return tensor.name, deviation


def _read_rows(plan: Plan, first: int, last: int, source: int) -> Array:
    """Rows of a tensor, read instead of mapped: pages of a mapping would stay in memory."""
    size = int(plan.tensor.n_bytes) // plan.rows
    content = os.pread(source, (last - first) * size, plan.tensor.data_offset + first * size)
    return np.frombuffer(content, plan.tensor.data.dtype).reshape(last - first, -1)


def _as_floats(rows: Array, plan: Plan) -> Array:
    kind = plan.tensor.tensor_type
    if plan.dtype is None:
        return np.ascontiguousarray(rows)
    floats = rows if kind != GGMLQuantizationType.BF16 and kind in FLOAT_KINDS else None
    values: Array = dequantize(rows, kind) if floats is None else floats
    if plan.shift:
        values = values.astype(np.float32) - np.float32(plan.shift)
    result = values.astype(plan.dtype)
    if not np.isfinite(result).all():
        raise ModelError(
            f"the tensor {plan.tensor.name!r} has weights that are not finite in {plan.dtype}"
        )
    return result


def _write_all(descriptor: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
