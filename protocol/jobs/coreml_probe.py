"""Settings of a CoreML measurement, and its result: one JSON object on stdout."""

from typing import Annotated, Literal

import msgspec

from protocol.jobs.convert import FunctionCost
from protocol.settings import ChildSettings, ComputeUnits

ProbeKind = Literal[
    "functions", "device", "draft-loop", "target-loop", "injection", "prefill", "soak"
]


class ProbeSettings(ChildSettings, frozen=True, kw_only=True):
    """One measurement, in a separate process: drivers hang and crash."""

    kind: ProbeKind
    model: str = ""
    """Folder of the converted model; for `prefill`, of the converted target."""
    target: str = ""
    """Folder of the MLX model, for `target-loop`, `injection` and `prefill`."""
    compute_units: ComputeUnits = "auto"
    half: bool = False
    """injection: use a float16 cache, whatever the target's type is."""
    calls: Annotated[int, msgspec.Meta(ge=1)] = 20
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """Duration of the loops; prefill: no longer prompt is started after this time."""
    barrier: tuple[int, int] | None = None
    """Loops: both ends of a pipe shared by all probes that start at the same time."""
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1


class PrefillTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times of a prompt computed both ways; milliseconds until the cache holds it."""

    tokens: int
    mlx_ms: float
    coreml_ms: float


class ProbeResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Result of a probe; fields of other kinds are left out."""

    kind: ProbeKind
    compute_units: str
    compute_unit: str = ""
    """Where it ran, as far as known."""
    costs: list[FunctionCost] = []
    """functions: every function of the package."""
    calls: int = 0
    """device: tokens compared. Loops, soak: number of calls."""
    per_second: float = 0.0
    """Loops, soak: calls per second."""
    slowest_ms: float = 0.0
    """Loops, soak: the slowest call."""
    ready_s: float = 0.0
    """Loops: time at which the model was loaded and warm, by the machine's monotonic clock."""
    began_s: float = 0.0
    """Loops: start of the measurement; with a barrier, after all probes were ready."""
    same_best: float = 0.0
    """device: share of positions with the reference runtime's best token. soak: share of the
    calls with the best token of the first such call.
    """
    worst_logit: float = 0.0
    """device, soak: largest difference of a best logit from the reference."""
    grown_mb: float = 0.0
    """soak: growth of the resident memory since the first pass."""
    tokens: int = 0
    """injection: length of the prompt."""
    milliseconds: float = 0.0
    """injection: median time from the prompt's end to a cache that can decode."""
    written_ms: float = 0.0
    """injection: median time before that to write all rows into the cache, chunk by chunk, while
    the prompt is computed.
    """
    dtype: str = ""
    """injection: data type of the cache."""
    prefills: list[PrefillTime] = []
    """prefill: times in rising order of length."""
    failed: str = ""
    """Reason why there is no result."""
