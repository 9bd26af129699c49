"""Read constants of a saved package: `weight.bin` (MIL blob storage 2) and immediate values."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from coremltools.proto import MIL_pb2

from protocol.errors import ModelError

Array = npt.NDArray[Any]

_TYPE: Any = MIL_pb2.DataType
DTYPES: dict[int, Any] = {
    _TYPE.FLOAT16: np.float16,
    _TYPE.FLOAT32: np.float32,
    _TYPE.INT32: np.int32,
    _TYPE.INT16: np.int16,
    _TYPE.UINT16: np.uint16,
    _TYPE.INT8: np.int8,
    _TYPE.UINT8: np.uint8,
    _TYPE.BOOL: np.bool_,
}
FLOAT16 = _TYPE.FLOAT16
_PACKED = {_TYPE.UINT4: 4, _TYPE.UINT6: 6}
_SENTINEL = 0xDEADBEEF


_LARGEST = np.float32(65504)
_SMALLEST_NORMAL = np.float32(2**-14)
_GRID = np.float32(0.75)
"""A float32 of this size has the spacing of float16's subnormal numbers."""


def to_float16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round like float16, ties to even, staying float32.

    The result equals numpy's two casts, which take ten times as long.
    """
    magnitude = np.abs(array)
    if not magnitude.max(initial=0) < _LARGEST:
        # Values that are too large become infinite; these and NaN are left to numpy.
        with np.errstate(over="ignore"):
            return array.astype(np.float16).astype(np.float32)
    bits = array.view(np.uint32)
    odd = (bits >> 13) & 1
    near = ((bits + (odd + 0xFFF)) & np.uint32(0xFFFFE000)).view(np.float32)
    subnormal = np.copysign((magnitude + _GRID) - _GRID, array)
    np.copyto(near, subnormal, where=magnitude < _SMALLEST_NORMAL)
    return near


def unpack(raw: npt.NDArray[np.uint8], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """Unpack unsigned integers of a few bits, contiguous, least significant bit first."""
    fields = np.unpackbits(raw, bitorder="little")[: count * bits].reshape(count, bits)
    weighted = fields << np.arange(bits, dtype=np.uint8)
    values: npt.NDArray[np.uint8] = weighted.sum(axis=1, dtype=np.uint8)
    return values


def _view_as(raw: npt.NDArray[np.uint8], kind: int, count: int) -> Array:
    if kind in _PACKED:
        return unpack(raw, _PACKED[kind], count)
    if kind not in DTYPES:
        raise ModelError(f"the package has a constant of the unknown type {_TYPE.Name(kind)}")
    typed: Array = raw.view(DTYPES[kind])[:count]
    return typed


def shape_of(value_type: Any) -> tuple[int, tuple[int, ...]]:
    """Return (data type, shape) of a tensor or of a state's content."""
    which = value_type.WhichOneof("type")
    tensor = (
        value_type.tensorType
        if which == "tensorType"
        else value_type.stateType.wrappedType.tensorType
    )
    return tensor.dataType, tuple(d.constant.size for d in tensor.dimensions)


class Constants:
    """The constants of a package; equal ones of several functions are one array."""

    def __init__(self, weights: Path) -> None:
        self._folder = weights
        self._files: dict[str, npt.NDArray[np.uint8]] = {}
        self._read: dict[tuple[str, int, tuple[int, ...]], Array] = {}

    def value(self, value: Any) -> Any:
        """Return a constant as an array, float16 as float32; a string as itself."""
        kind, shape = shape_of(value.type)
        if value.WhichOneof("value") == "blobFileValue":
            where = value.blobFileValue
            key = (Path(where.fileName).name, where.offset, shape)
            if key not in self._read:
                self._read[key] = self._blob(key[0], key[1], kind, shape)
            return self._read[key]
        return _immediate(value.immediateValue.tensor, kind, shape)

    def _blob(self, name: str, offset: int, kind: int, shape: tuple[int, ...]) -> Array:
        if name not in self._files:
            self._files[name] = np.memmap(self._folder / name, np.uint8, "r")
        file = self._files[name]
        sentinel = int(file[offset : offset + 4].view("<u4")[0])
        if sentinel != _SENTINEL:
            raise ModelError(f"{name!r} has no constant at {offset}: the package is broken")
        size, data = (int(n) for n in file[offset + 8 : offset + 24].view("<u8"))
        count = int(np.prod(shape, dtype=np.int64))
        return _widen(_view_as(np.asarray(file[data : data + size]), kind, count).reshape(shape))


def _immediate(tensor: Any, kind: int, shape: tuple[int, ...]) -> Any:
    which = tensor.WhichOneof("value")
    if which == "strings":
        return tensor.strings.values[0]
    if which == "bytes":
        raw = np.frombuffer(tensor.bytes.values, np.uint8)
        values = _view_as(raw, kind, int(np.prod(shape, dtype=np.int64)))
    else:
        values = np.array(getattr(tensor, which).values, DTYPES[kind])
    return _widen(values.reshape(shape))


def _widen(array: Array) -> Array:
    """Widen float16 to float32, which numpy computes faster; each op rounds its result."""
    return array.astype(np.float32) if array.dtype == np.float16 else array
