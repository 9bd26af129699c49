"""A GGUF file, read by the library `gguf` within the bounds of the file."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, ReaderTensor

from protocol.errors import ModelError

_MAGIC = b"GGUF"
_MOST_ELEMENTS = 1 << 22
"""Of a list in the metadata: sixteen times the tokens of the largest vocabulary."""
_LARGEST_SIDE = 1 << 40

Part = npt.NDArray[Any]


class GGUFFile(GGUFReader):
    """The metadata and tensors of a GGUF file; tensors are mapped, not read.

    The library reads lists one element at a time, and follows every count and offset. Here lists
    are read whole, and nothing is read beyond the file's end.

    Raises:
        ModelError: the file is missing, of another format, or not what it says it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_magic(path)
        try:
            super().__init__(path)
        except ModelError:
            raise
        # The library indexes, converts and decodes what the file says.
        except (
            ValueError,
            KeyError,
            IndexError,
            TypeError,
            OverflowError,
            OSError,
            struct.error,
        ) as error:
            raise ModelError(f"{str(path)!r} is a damaged GGUF file: {error}") from error
        if self.byte_order == "S":
            raise ModelError(f"{str(path)!r} has the other byte order, which is not supported")
        self._check_tensors()

    def value(self, key: str, default: Any = None) -> Any:
        """Return the metadata under `key`: a number, a text or a list."""
        field = self.fields.get(key)
        if field is None:
            return default
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise ModelError(f"{key} in {str(self.path)!r} is not UTF-8: {error}") from error

    def require(self, key: str) -> Any:
        """Return the metadata under `key`; raises ModelError if there is none."""
        found = self.value(key)
        if found is None:
            raise ModelError(f"{str(self.path)!r} lacks the metadata {key!r}")
        return found

    @property
    def architecture(self) -> str:
        """The family of models, in llama.cpp's words."""
        return str(self.value("general.architecture", ""))

    @property
    def parameters(self) -> int:
        """Weights of all tensors."""
        return sum(int(tensor.n_elements) for tensor in self.tensors)

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Any = None,
    ) -> Part:
        needed = np.dtype(dtype).itemsize * int(count)
        self._check_end(int(offset), needed)
        return super()._get(int(offset), dtype, int(count), override_order)

    def _check_end(self, offset: int, size: int) -> None:
        if size < 0 or offset + size > len(self.data):
            raise ModelError(
                f"{str(self.path)!r} is incomplete: it says that it has at least "
                f"{offset + size} bytes, and has {len(self.data)}; download it again"
            )

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Part], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        if count > _MOST_ELEMENTS:
            raise ModelError(f"{str(self.path)!r} has a list of {count} elements in its metadata")
        start = orig_offs + 12
        types = [GGUFValueType.ARRAY, kind]
        if kind == GGUFValueType.STRING:
            texts, size = self._strings(start, count)
            return 12 + size, texts, list(range(count)), types
        scalar = self.gguf_scalar_to_np.get(kind)
        if scalar is None:
            raise ModelError(f"{str(self.path)!r} has a list of lists in its metadata")
        values = self._get(start, scalar, count)
        return 12 + int(values.nbytes), [values], [0], types

    def _strings(self, start: int, count: int) -> tuple[list[Any], int]:
        """Texts, as views of the file that the library decodes, and their size there."""
        data = self.data.data.cast("B")
        texts: list[Any] = []
        offset = start
        for _ in range(count):
            self._check_end(offset, 8)
            (length,) = struct.unpack_from("<Q", data, offset)
            self._check_end(offset + 8, length)
            texts.append(data[offset + 8 : offset + 8 + length])
            offset += 8 + length
        return texts, offset - start

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            sides = [int(side) for side in field.parts[3]]
            count = 1
            for side in sides:
                count *= side
            if not sides or not 0 < count < _LARGEST_SIDE:
                name = bytes(field.parts[1]).decode(errors="replace")
                raise ModelError(f"the tensor {name!r} in {str(self.path)!r} has the shape {sides}")
        super()._build_tensors(start_offs, fields)

    def _check_tensors(self) -> None:
        """Refuse tensors that share bytes: at least one of them is not what it says."""
        end, before = 0, ""
        for tensor in sorted(self.tensors, key=lambda one: one.data_offset):
            if tensor.data_offset < end:
                raise ModelError(
                    f"{str(self.path)!r} is damaged: the tensors {before!r} and {tensor.name!r} "
                    "overlap"
                )
            end, before = tensor.data_offset + int(tensor.n_bytes), tensor.name


def shape_of(tensor: ReaderTensor) -> tuple[int, ...]:
    """Its shape as a matrix of rows; the file names the sides from the innermost."""
    return tuple(int(side) for side in reversed(tensor.shape.tolist()))


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            start = stream.read(4)
    except FileNotFoundError as error:
        raise ModelError(f"there is no file {str(path)!r}") from error
    except OSError as error:
        raise ModelError(f"cannot read {str(path)!r}: {error}") from error
    if start != _MAGIC:
        reason = f"begins with {start!r}" if start else "is empty"
        raise ModelError(f"{str(path)!r} is not a GGUF file: it {reason}")
