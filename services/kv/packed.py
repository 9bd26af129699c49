"""Arrays that the sequences of a shared pass give to attention, one each."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PackedKV:
    """Keys, values or masks of each sequence of a row, in its order."""

    values: list[Any]
    borders: list[int]
    """Offsets in the row at which all sequences but the first start."""
