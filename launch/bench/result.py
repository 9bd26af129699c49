"""What the benchmark writes: one JSON object.

Its schema is `tests/launch/bench/bench.schema.json`.
"""

from typing import Annotated

import msgspec

from launch.bench.variant import Variant
from launch.prompts import PromptId
from protocol.messages import Sampling, Statistics, Tokens, TraceEvent

SCHEMA_VERSION = 8

Positive = Annotated[float, msgspec.Meta(ge=0.0)]


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The machine."""

    system: str
    processor: str
    cores: int
    memory_gb: float
    gpus: list[str] = []
    units: dict[str, str] = {}
    """Role -> where it computed, as it said in its handshake."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What was run."""

    model: str
    draft_model: str
    draft_backend: str
    mode: list[Variant]
    sampling: list[Sampling]
    """One per temperature."""
    max_tokens: int
    repeats: int
    prompts: str
    versions: dict[str, str] = {}
    command: str = ""


class BenchRun(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    prompt_id: PromptId
    category: str
    mode: str
    """Label of the variant."""
    repeat: int
    temperature: float
    prompt_tokens: int
    tokens: int
    ttft_ms: Positive
    decode_tps: Positive
    """Decoded tokens per second, without the first."""
    decode_s: Positive
    peak_memory_gb: dict[str, float] = {}
    """Process -> highest resident memory until the end of this run; on a GPU `role:gpu`."""
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[float] = []
    cache_hits: int = 0
    cache_misses: int = 0
    output_sha256: str
    statistics: Statistics | None = None
    """None for mlx-lm."""
    timeline: list[TraceEvent] = []
    """Who did what in the first rounds; of one mode only."""
    emitted: Tokens = []


class Interval(msgspec.Struct, frozen=True):
    """From, to."""

    low: float
    high: float


class ModeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Of one mode: all prompts of a category at a temperature."""

    runs: int
    median: float
    """tok/s."""
    iqr: Interval
    speedup_vs_ar: float | None
    """Median over prompts of tok/s over plain decoding's in this run."""
    ci95: Interval | None
    """Of that median, bootstrapped over prompts; None with fewer than three."""
    ttft_ms: float
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    per_position: list[float] = []
    drafter: str = ""
    state_bytes_per_round: float | None = None
    """The target's states that a drafter read; None: it reads none."""
    offered_by_lag: list[int] = []
    accepted_by_lag: list[int] = []
    """As in `Statistics`, of all runs."""
    hit_rate: float | None = None
    hit_rate_after: dict[str, float] = {}
    """By the origin of the round's chain."""
    hits_within: list[float] = []
    """Index F - 1: share of looked-up rounds whose outcome was among the best F prepared for
    its length."""
    overlap_ratio: float | None = None
    phase_ms: dict[str, float] = {}
    ipc_share: float | None = None
    """Share of the decoding time in which the verifier waited after hits, and for messages."""
    plain_rounds: float | None = None
    """Share of rounds decoded plainly because that was faster."""
    predicted_tok_s: float | None = None
    bound_tok_s: float | None = None
    """Theorem 7 with these rounds' hits, lengths and verification times."""
    efficiency: float | None = None
    """tok/s of all runs together over that bound."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where a mode left plain decoding."""

    prompt_id: PromptId
    mode: str
    repeat: int
    temperature: float
    position: int
    margin: float | None
    """Distance of the two tokens' scores in logits; None if one answer ended early."""
    tie: bool
    """Whether the distance is within rounding."""


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """What was verified."""

    lossless: bool | None
    """Every mode gave the tokens of plain decoding; None if that could not be checked."""
    compared: int
    """Answers that were compared with plain decoding's."""
    rounding_ties: int
    not_compared: str = ""
    """Which modes were not, and why."""
    divergences: list[Divergence] = []


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Two processes in turn, and at once."""

    first: str
    second: str
    first_ms: float
    second_ms: float
    together_ms: float
    speed_up: float
    """In turn over together; 2 at best."""
    efficiency: float
    """Share of the shorter work that the longer one hid: 1 all, 0 none."""


class SpeedPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator expects of this machine and pair."""

    best_mode: str
    num_draft_tokens: int
    branches: int
    tok_s: dict[str, float]
    """Mode -> tok/s; `ssd` is adaptive, `ssd:k=K:b=B` the best fixed pair."""
    speedup_vs_ar: float


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the pair, measured alone, and what follows."""

    verify_ms: dict[str, float]
    """m -> T_v(m)."""
    draft_ms: dict[str, float]
    """B -> T_d(B), one depth of the drafter over B branches; empty without a draft model."""
    ipc_ms: float
    """One message, from process to process."""
    contention: float
    """How much slower a verification is while the drafter works: .1 is a tenth."""
    acceptance_rate: float
    prediction: SpeedPrediction | None = None


class WeightReading(msgspec.Struct, frozen=True, kw_only=True):
    """What decoding reads, and how fast this machine does."""

    weight_bytes: int
    """Of the target, for each pass."""
    read_bytes_s: float


class BenchFile(msgspec.Struct, frozen=True, kw_only=True):
    """The whole."""

    schema_version: int = SCHEMA_VERSION
    tool_version: str
    created: str
    hardware: Hardware
    config: Config
    cold_start: dict[str, float] = {}
    """Seconds: until the stack was ready, and its first token after that."""
    runs: list[BenchRun]
    summary: dict[str, ModeSummary]
    """Mode (`mode@T` where there are several temperatures) -> figures over all prompts."""
    categories: dict[str, dict[str, ModeSummary]] = {}
    """The same by category, if there are several."""
    profile: Profile | None = None
    overlap: Overlap | None = None
    reading: WeightReading | None = None
    """None if nothing was decoded."""
    checks: Checks
