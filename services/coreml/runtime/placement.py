"""Where the operations of a function run, and what the whole may be called."""

from collections import Counter
from collections.abc import Iterable

import msgspec

ANE = "ane"
_LEAST_SHARE = 0.95
"""Of the operations. A few at the ends may be on another device, but no product of weights."""


class Placement(msgspec.Struct, frozen=True):
    """Operations of one function by device, as CoreML's compute plan has them."""

    devices: dict[str, int]
    """"ane", "gpu" or "cpu" to number of operations."""
    off_ane: dict[str, int]
    """Operations that are not on the Neural Engine, by kind."""

    @property
    def unit(self) -> str:
        """The compute unit that this may be called: "ane" only if it is."""
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
    """From (kind, device) of each operation that is placed at all."""
    placed = list(operations)
    devices = Counter(device for _, device in placed)
    off = Counter(kind.split(".")[-1] for kind, device in placed if device != ANE)
    return Placement(dict(devices), dict(off))


def joint_unit(placements: Iterable[Placement]) -> str:
    """Name the compute unit of a model whose functions are placed like this."""
    units = {placement.unit for placement in placements}
    return units.pop() if len(units) == 1 else "mixed"
