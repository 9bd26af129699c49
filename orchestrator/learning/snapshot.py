"""What the planner measured, as plain data that outlives the process.

Each estimator writes its part (`save`) and reads it back (`restore`).
"""

from typing import Annotated, Literal

import msgspec

from protocol.messages import Mode, Origin

_Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
_Positive = Annotated[float, msgspec.Meta(gt=0.0, le=1e12)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Shares(_Record, frozen=True, kw_only=True):
    """Sums of parts and of wholes, one pair per place."""

    parts: list[_Amount]
    wholes: list[_Positive]


class Average(_Record, frozen=True, kw_only=True):
    """A running mean and how many samples it counts for."""

    value: _Amount
    weight: _Amount


class Rate(_Record, frozen=True, kw_only=True):
    """Tokens, and the time that they took."""

    tokens: _Amount
    milliseconds: _Amount


class Trial(_Record, frozen=True, kw_only=True):
    """How speculation has fared against plain decoding."""

    speculative: Rate
    plain: Rate
    pausing: bool
    tolerance: Annotated[float, msgspec.Meta(gt=0.0, le=100.0)]


class Widths(_Record, frozen=True, kw_only=True):
    """What each number of branches would gain, in tokens, and which is in use."""

    gains: list[_Amount]
    chosen: Annotated[int, msgspec.Meta(ge=0)]


class TreeTrialState(_Record, frozen=True, kw_only=True):
    """Whether trees pay, and how far the trial of that has come."""

    pays: bool
    log_gain: Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]
    """Mean over pairs of turns."""
    weight: _Amount
    """Pairs that it counts for."""
    pairs: Annotated[int, msgspec.Meta(ge=0)]
    """Of this trial."""
    rest: Annotated[int, msgspec.Meta(ge=0)]
    """Rounds until the next trial."""
    next_rest: Annotated[int, msgspec.Meta(ge=1)]
    """The same behind that one."""


class Arm(_Record, frozen=True, kw_only=True):
    """Rounds at one of several choices."""

    rounds: _Amount
    tokens: _Amount
    squares: _Amount
    milliseconds: _Amount


class EstimateSnapshot(_Record, frozen=True, kw_only=True):
    """Everything, for one pair of models on one machine."""

    version: Literal[2] = 2
    saved_at: _Amount = 0.0
    """Seconds since 1970; 0 is long ago."""
    verify_latency: dict[Annotated[int, msgspec.Meta(ge=1)], _Positive]
    plain_latency: dict[Annotated[int, msgspec.Meta(ge=1)], _Positive]
    tree_latency: dict[Annotated[int, msgspec.Meta(ge=1)], _Positive] = {}
    calibrations: dict[Origin, Shares]
    after_rejection: dict[Origin, Shares]
    after_all: dict[Origin, Shares]
    idle_ms: dict[Origin, Average]
    acceptance: dict[Origin, Average]
    tree_step_ms: Average
    backup_ms: Average
    backup_idle_ms: Average = Average(value=0.0, weight=0.0)
    run_start_ms: Average = Average(value=0.0, weight=0.0)
    draft_length: _Amount
    """The longest draft that was worth verifying."""
    trials: dict[Mode, Trial]
    step_latency: dict[str, Average] = {}
    """By the name of the mean, see `latency.StepLatency`."""
    tree_width: Widths | None = None
    backups: Shares | None = None
    """Draft tokens of backups, accepted of offered: one place."""
    batch_trials: dict[str, Trial] = {}
    """By mode and size class of the batch, as `ssd 3`."""
    tree_trials: dict[Mode, TreeTrialState] = {}
    siblings: dict[Origin, Shares] = {}
    """Runners-up beside draft tokens, by confidence."""
    saguaro: dict[str, Arm] = {}
    """By the weight C, as `0.4`."""
