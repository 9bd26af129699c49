"""Settings of a measurement of CoreML, and its result: one JSON object on stdout."""

from typing import Annotated, Literal

import msgspec

from protocol.jobs.convert import FunctionCost
from protocol.settings import ChildSettings, ComputeUnits

ProbeKind = Literal[
    "functions", "device", "draft-loop", "target-loop", "injection", "prefill", "soak"
]


class ProbeSettings(ChildSettings, frozen=True, kw_only=True):
    """One measurement, in a process of its own: drivers hang and crash."""

    kind: ProbeKind
    model: str = ""
    """Folder of the converted model; for `prefill` of the target's own conversion."""
    target: str = ""
    """Folder of the MLX model, for `target-loop`, `injection` and `prefill`."""
    compute_units: ComputeUnits = "auto"
    half: bool = False
    """injection: into a float16 cache, whatever the target's is."""
    calls: Annotated[int, msgspec.Meta(ge=1)] = 20
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """Of the loops; prefill: after so long no longer prompt is begun."""
    barrier: tuple[int, int] | None = None
    """Loops: both ends of a pipe that all probes hold which are to begin at the same time."""
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1


class PrefillTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt of one length, computed both ways; milliseconds until the cache holds it."""

    tokens: int
    mlx_ms: float
    coreml_ms: float


class ProbeResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Result of a probe; fields of other kinds are left out."""

    kind: ProbeKind
    compute_units: str
    compute_unit: str = ""
    """Where it ran, as far as that is known."""
    costs: list[FunctionCost] = []
    """functions: every function of the package."""
    calls: int = 0
    """device: tokens compared. Loops, soak: calls made."""
    per_second: float = 0.0
    """Loops, soak."""
    slowest_ms: float = 0.0
    """Loops, soak: the slowest call."""
    ready_s: float = 0.0
    """Loops: when the model was loaded and warm, by the machine's monotonic clock."""
    began_s: float = 0.0
    """Loops: when measuring began; with a barrier after all were ready."""
    same_best: float = 0.0
    """device: share of positions with the best token of the reference runtime. soak: share of
    the calls with the best token of the first such call."""
    worst_logit: float = 0.0
    """device, soak: largest difference of a best logit from that."""
    grown_mb: float = 0.0
    """soak: resident memory at the end, less that after the first pass."""
    tokens: int = 0
    """injection: length of the prompt."""
    milliseconds: float = 0.0
    """injection: the prompt's end to a cache to decode with; the median."""
    written_ms: float = 0.0
    """injection: before that, writing all rows where the cache will be, chunk by chunk, while
    the prompt is computed; the median."""
    dtype: str = ""
    """injection: of the cache."""
    prefills: list[PrefillTime] = []
    """prefill: in rising order."""
    failed: str = ""
    """Why there is no figure."""
