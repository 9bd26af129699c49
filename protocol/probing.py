"""What a probe of a machine is told, and what it finds: one JSON object on stdout."""

from typing import Annotated, Literal

import msgspec

from protocol.conversion import FunctionCost
from protocol.settings import ChildSettings, ComputeUnits

Kind = Literal["functions", "device", "draft-loop", "target-loop", "injection"]


class ProbeSettings(ChildSettings, frozen=True, kw_only=True):
    """One measurement, in a process of its own: drivers hang and crash."""

    kind: Kind
    model: str = ""
    """Folder of the converted model."""
    target: str = ""
    """Folder of the MLX model, for `target-loop` and `injection`."""
    compute_units: ComputeUnits = "auto"
    calls: Annotated[int, msgspec.Meta(ge=1)] = 20
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """Of the loops."""
    barrier: tuple[int, int] | None = None
    """Loops: both ends of a pipe that all probes hold which are to begin at the same time."""
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1


class Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a probe found; what does not belong to its kind is left out."""

    kind: Kind
    compute_units: str
    compute_unit: str = ""
    """Where it ran, as far as that is known."""
    costs: list[FunctionCost] = []
    """functions: every function of the package."""
    calls: int = 0
    """device: tokens compared. Loops: calls made."""
    per_second: float = 0.0
    """Loops."""
    slowest_ms: float = 0.0
    """Loops: the slowest call."""
    ready_s: float = 0.0
    """Loops: when the model was loaded and warm, by the machine's monotonic clock."""
    began_s: float = 0.0
    """Loops: when measuring began; with a barrier after all were ready."""
    same_best: float = 0.0
    """device: share of positions with the best token of the reference runtime."""
    worst_logit: float = 0.0
    """device: largest difference of a best logit from the reference runtime's."""
    tokens: int = 0
    """injection: length of the prompt."""
    milliseconds: float = 0.0
    """injection: arrays to cache, evaluated; the median."""
    failed: str = ""
    """Why there is no figure."""
