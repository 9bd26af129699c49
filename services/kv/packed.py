"""Arrays that the sequences of a shared pass hand to attention, one by one."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PackedKV:
    """Keys, values or masks of each sequence of a row, in its order."""

    values: list[Any]
    borders: list[int]
    """Where the parts of the row but the first begin."""
