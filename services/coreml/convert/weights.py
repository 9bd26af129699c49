"""Read a model folder's tensors as numpy arrays without MLX: safetensors, also MLX-quantised.

The numpy side of the `safetensors` package does not support bfloat16, hence our own reader.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.decoding.sampler import Floats
from protocol.errors import ModelError

_DTYPES: dict[str, type[np.generic]] = {
    "F16": np.float16,
    "F32": np.float32,
    "U32": np.uint32,
    "BF16": np.uint16,
}
_CHUNK = 1 << 22


class _Entry(NamedTuple):
    data: npt.NDArray[np.uint8]
    dtype: str
    shape: list[int]


class ModelTensors:
    """All tensors of a folder's `*.safetensors`, memory-mapped and read on demand."""

    def __init__(self, folder: Path) -> None:
        """Map the files; raises ModelError if there are none or one is broken."""
        self._folder = folder
        self._entries: dict[str, _Entry] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"the model folder {str(folder)!r} holds no *.safetensors")
        for file in files:
            try:
                self._entries |= _map_file(file)
            except (OSError, ValueError, KeyError, struct.error) as error:
                raise ModelError(f"{str(file)!r} is not a safetensors file ({error!r})") from error
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._quantization: dict[str, Any] = config.get("quantization") or {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as it is stored; bfloat16 as float32.

        Raises:
            ModelError: there is none of this name, or its type is unknown.
        """
        if name not in self._entries:
            raise ModelError(f"the model {str(self._folder)!r} has no tensor {name}")
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise ModelError(f"the tensor {name} has the unknown type {entry.dtype}")
        stored = entry.data.view(_DTYPES[entry.dtype]).reshape(entry.shape)
        if entry.dtype == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored

    def matrix(self, layer: str) -> Floats:
        """Return a linear or embedding layer's weight, [rows, columns] float32, dequantised."""
        stored = self.tensor(f"{layer}.weight")
        if f"{layer}.scales" not in self:
            return stored.astype(np.float32)
        scheme = self._quantization.get(layer, self._quantization)
        if scheme.get("mode", "affine") != "affine":
            raise ModelError(f"{layer} is quantised as {scheme['mode']!r}; known: affine")
        bits, group = scheme["bits"], scheme["group_size"]
        levels = _unpack(stored, bits)
        scales = self.tensor(f"{layer}.scales").astype(np.float32)[..., None]
        biases = self.tensor(f"{layer}.biases").astype(np.float32)[..., None]
        grouped = levels.reshape(len(levels), -1, group).astype(np.float32)
        dense: Floats = (grouped * scales + biases).reshape(len(levels), -1)
        return dense

    def vector(self, name: str) -> Floats:
        """Return a bias or a norm's weight, float32."""
        values: Floats = self.tensor(name).astype(np.float32)
        return values


def _map_file(file: Path) -> dict[str, _Entry]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    data = np.memmap(file, np.uint8, "r", offset=8 + length)
    header.pop("__metadata__", None)
    return {
        name: _Entry(data[slice(*fields["data_offsets"])], fields["dtype"], fields["shape"])
        for name, fields in header.items()
    }


def _unpack(words: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """Unpack MLX's packed integers: contiguous little-endian bit fields, row by row."""
    rows = len(words)
    stream = np.unpackbits(
        np.ascontiguousarray(words).view(np.uint8).reshape(rows, -1), axis=1, bitorder="little"
    )
    weighted = stream.reshape(rows, -1, bits) << np.arange(bits, dtype=np.uint8)
    levels: npt.NDArray[np.uint8] = weighted.sum(-1, dtype=np.uint8)
    return levels


def fingerprint_of(folder: Path) -> str:
    """Hash everything that a conversion reads from a model folder."""
    digest = hashlib.sha256()
    names = ("config.json", "draft_head.json", "tokenizer.json")
    files = [folder / name for name in names] + sorted(folder.glob("*.safetensors"))
    for file in files:
        if not file.is_file():
            continue
        digest.update(file.name.encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[:16]
