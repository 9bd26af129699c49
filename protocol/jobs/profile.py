"""Requests of `ssd bench --only profile` and `overlap` to a profiler, one JSON object a line.

A profiler loads one model, the target or the drafter, in the way of its service, and times it.
"""

from typing import Annotated, Literal

import msgspec

from protocol.jobs.reference import ReferenceSettings
from protocol.messages import Tokens
from protocol.settings import DraftWeights, MetalKernels, RankGroupSettings

ProfiledRole = Literal["verifier", "drafter"]


class ProfilerSettings(ReferenceSettings, frozen=True, kw_only=True):
    """Settings of a profiler."""

    part: ProfiledRole
    cores: list[int] = msgspec.field(default_factory=list)
    """Cores to run on (`ChildSettings`)."""
    draft_weights: DraftWeights = "auto"
    """Weights of the drafter (`DrafterSettings`)."""
    metal_kernels: MetalKernels = "auto"
    ranks: RankGroupSettings | None = None
    """Group of ranks (`VerifierSettings`)."""


class TimeRequest(msgspec.Struct, frozen=True, tag="time", forbid_unknown_fields=True):
    """Measure T_v(m) or T_d(B) for each of these counts. Answer: TimeResult."""

    counts: list[Annotated[int, msgspec.Meta(ge=1)]]
    context: Tokens


class TimeResult(msgspec.Struct, frozen=True):
    """Median milliseconds by count."""

    medians_ms: dict[str, float]
    compute_unit: str


class WorkRequest(msgspec.Struct, frozen=True, tag="work", forbid_unknown_fields=True):
    """Do `repeats` verifications of, or tree steps over, `count` tokens. Answer: WorkResult."""

    count: Annotated[int, msgspec.Meta(ge=1)]
    repeats: Annotated[int, msgspec.Meta(ge=1)]
    context: Tokens


class WorkResult(msgspec.Struct, frozen=True):
    """Duration of that work."""

    seconds: float


class ProfilerReady(msgspec.Struct, frozen=True):
    """The first line: the model is loaded."""

    compute_unit: str


ProfilerRequest = TimeRequest | WorkRequest
