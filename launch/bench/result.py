"""The output of the benchmark: one JSON object.

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
    """Role -> device reported in its handshake."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the benchmark."""

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
    """Events of each process in the first rounds; for one mode only."""
    emitted: Tokens = []


class Interval(msgspec.Struct, frozen=True):
    """An interval from low to high."""

    low: float
    high: float


class ModeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one mode: all prompts of a category at a temperature."""

    runs: int
    median: float
    """Median in tok/s."""
    iqr: Interval
    speedup_vs_ar: float | None
    """Median over prompts of tok/s relative to plain decoding in this run."""
    ci95: Interval | None
    """Confidence interval of that median, bootstrapped over prompts; None with fewer than three."""
    ttft_ms: float
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    per_position: list[float] = []
    drafter: str = ""
    state_bytes_per_round: float | None = None
    """Size of the target's states per round that a drafter read; None: it reads none."""
    offered_by_lag: list[int] = []
    accepted_by_lag: list[int] = []
    """Accepted tokens by lag (`Statistics`), over all runs."""
    hit_rate: float | None = None
    hit_rate_after: dict[str, float] = {}
    """Hit rate by the origin of the round's chain."""
    hits_within: list[float] = []
    """Index F - 1: share of looked-up rounds whose outcome was among the best F prepared for its
    length.
    """
    overlap_ratio: float | None = None
    phase_ms: dict[str, float] = {}
    ipc_share: float | None = None
    """Share of the decoding time in which the verifier waited after hits, and for messages."""
    plain_rounds: float | None = None
    """Share of rounds decoded plainly because that was faster."""
    bound_tok_s: float | None = None
    """Theorem 7 with the hits, lengths and verification times of these rounds."""
    efficiency: float | None = None
    """tok/s of all runs together relative to that bound."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """First difference of a mode from plain decoding."""

    prompt_id: PromptId
    mode: str
    repeat: int
    temperature: float
    position: int
    margin: float | None
    """Distance of the two tokens' scores in logits; None if one answer ended early."""
    tie: bool
    """True if the distance is within rounding."""


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the losslessness checks."""

    lossless: bool | None
    """True if every mode gave the tokens of plain decoding; None if that could not be checked."""
    compared: int
    """Number of answers that were compared with plain decoding's."""
    rounding_ties: int
    not_compared: str = ""
    """The modes that were not compared, and why."""
    divergences: list[Divergence] = []


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Times of two processes in turn, and at once."""

    first: str
    second: str
    first_ms: float
    second_ms: float
    together_ms: float
    speed_up: float
    """Time in turn over time together; 2 at best."""
    efficiency: float
    """Share of the shorter work that the longer one hid: 1 is all, 0 none."""


class SpeedPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The simulator's expectation for this machine and pair."""

    best_mode: str
    num_draft_tokens: int
    branches: int
    tok_s: dict[str, float]
    """Mode -> tok/s; `ssd` is adaptive, `ssd:k=K:b=B` the best fixed pair."""
    speedup_vs_ar: float


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of machine and pair, and conclusions from them."""

    verify_ms: dict[str, float]
    """m -> T_v(m)."""
    draft_ms: dict[str, float]
    """B -> T_d(B), one depth of the drafter over B branches; empty without a draft model."""
    ipc_ms: float
    """Latency of one message between processes."""
    contention: float
    """Relative slowdown of a verification while the drafter works: .1 is a tenth."""
    acceptance_rate: float
    prediction: SpeedPrediction | None = None


class WeightReading(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of weights read in decoding, and the machine's rate."""

    weight_bytes: int
    """Bytes of the target, for each pass."""
    read_bytes_s: float


class BenchFile(msgspec.Struct, frozen=True, kw_only=True):
    """The complete result."""

    schema_version: int = SCHEMA_VERSION
    tool_version: str
    created: str
    hardware: Hardware
    config: Config
    cold_start: dict[str, float] = {}
    """Seconds: until the stack was ready, and its first token after that."""
    runs: list[BenchRun]
    summary: dict[str, ModeSummary]
    """Results over all prompts by mode (`mode@T` with several temperatures)."""
    categories: dict[str, dict[str, ModeSummary]] = {}
    """Results by category, if there are several."""
    profile: Profile | None = None
    overlap: Overlap | None = None
    reading: WeightReading | None = None
    """None if nothing was decoded."""
    checks: Checks
