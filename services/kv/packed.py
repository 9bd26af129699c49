"""What the sequences of a shared pass hand to attention, each part for itself."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PackedKV:
    """What belongs to each sequence of a row, in its order: keys, values or masks."""

    values: list[Any]
    borders: list[int]
    """Where the parts of the row but the first begin."""
