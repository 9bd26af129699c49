"""Devices on which a function's operations run, and the compute unit to report."""

from collections import Counter
from collections.abc import Iterable

import msgspec

ANE = "ane"
_LEAST_SHARE = 0.95
"""Minimum share of operations.

A few at the ends may be on another device, but no product of weights.
"""


class Placement(msgspec.Struct, frozen=True):
    """Operations of one function by device, as CoreML's compute plan has them."""

    devices: dict[str, int]
    """"ane", "gpu" or "cpu" to number of operations."""
    off_ane: dict[str, int]
    """Operations that are not on the Neural Engine, by kind."""

    @property
    def unit(self) -> str:
        """The compute unit to report: "ane" only for the Neural Engine."""
        total = sum(self.devices.values())
        if not total:
            return "unknown"
        if self.devices.get(ANE, 0) >= _LEAST_SHARE * total and not self.off_ane.get("conv"):
            return ANE
        others = [
            name
            for name, count in self.devices.items()
            if name != ANE and count >= _LEAST_SHARE * total
        ]
        return others[0] if others else "mixed"


def placement_of(operations: Iterable[tuple[str, str]]) -> Placement:
    """Return the placement of (kind, device) pairs, one per placed operation."""
    placed = list(operations)
    devices = Counter(device for _, device in placed)
    off = Counter(kind.split(".")[-1] for kind, device in placed if device != ANE)
    return Placement(dict(devices), dict(off))


def joint_unit(placements: Iterable[Placement]) -> str:
    """Name the compute unit of a model whose functions are placed like this."""
    units = {placement.unit for placement in placements}
    return units.pop() if len(units) == 1 else "mixed"
