"""Headers of safetensors files: the tensors in a file, without reading their data."""

import json
import struct
from pathlib import Path
from typing import Any

_LARGEST_HEADER = 100 * 1024**2


def read_header(file: Path) -> dict[str, Any]:
    """Return `dtype`, `shape` and `data_offsets` per tensor; `__metadata__` if the file has it.

    Raises:
        OSError, ValueError, struct.error: the file cannot be read, or is of another format.
    """
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _LARGEST_HEADER:
            raise ValueError(f"{file.name} claims a header of {length} bytes")
        header: dict[str, Any] = json.loads(stream.read(length))
    return header
