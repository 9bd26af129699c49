"""What `--emulate-target-cost` names: the size of the target whose cost is emulated."""

import re
from typing import NamedTuple

from protocol.errors import UsageError

_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(x|[MB]|[MG]B)?", re.IGNORECASE)

_UNITS = {"M": 1e6, "B": 1e9, "MB": 1e6, "GB": 1e9}


class EmulatedSize(NamedTuple):
    """A factor of the target's own size, a number of parameters, or one of bytes."""

    amount: float
    unit: str
    """x, M, B (parameters), MB or GB (weights)."""

    def bytes_to_add(self, parameters: int, nbytes: int, itemsize: int) -> float:
        """Bytes of weights to add to a target of this size.

        Args:
            parameters: the target's own weights.
            nbytes: what they take.
            itemsize: bytes of each added weight.
        """
        match self.unit:
            case "x":
                return (self.amount - 1.0) * nbytes
            case "M" | "B":
                return (self.amount * _UNITS[self.unit] - parameters) * itemsize
            case _:
                return self.amount * _UNITS[self.unit] - nbytes


def parse_size(text: str) -> EmulatedSize:
    """Read `4x` (or `4`), `8B`, `500M`, `16GB`; raises UsageError."""
    found = _PATTERN.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise UsageError(
            f"{text!r} is no target size to emulate; "
            "give a factor (4x), parameters (8B, 500M) or bytes of weights (16GB)"
        )
    unit = (found[2] or "x").upper()
    return EmulatedSize(float(found[1]), "x" if unit == "X" else unit)
