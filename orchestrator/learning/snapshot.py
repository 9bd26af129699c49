"""What is remembered of the estimates between two runs, as plain data.

Each learner gives its part (`memory`) and takes it back (`recall`) as an assumption: it
counts for little, so that a machine or a text that has changed is soon believed.
"""

from typing import Annotated, Literal

import msgspec

from protocol.messages import Mode, Origin

_Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
_Tried = Annotated[float, msgspec.Meta(gt=0.0, le=1e12)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Shares(_Record, frozen=True, kw_only=True):
    """Per place, how often it was tried, and how often it was found good."""

    found: list[_Amount]
    tried: list[_Tried]

    def fits(self, places: int) -> bool:
        """Whether it has this many places."""
        return len(self.found) == len(self.tried) == places

    def weighing(self, at_most: float) -> tuple[list[float], list[float]]:
        """(found, tried) with the same shares, none tried more often than `at_most`."""
        tried = [min(count, at_most) for count in self.tried]
        pairs = zip(self.found, self.tried, tried, strict=True)
        return [min(1.0, good / all_) * kept for good, all_, kept in pairs], tried


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
    patience: Annotated[float, msgspec.Meta(gt=0.0, le=100.0)]


class Line(_Record, frozen=True, kw_only=True):
    """A straight line as running means, and a first step that has more to do."""

    weight: _Amount
    branches: _Amount
    milliseconds: _Amount
    squares: _Amount
    products: _Amount
    first_ms: _Amount
    firsts: _Amount
    chain_ms: _Amount
    chains: _Amount


class Widths(_Record, frozen=True, kw_only=True):
    """What each number of branches would gain, in tokens, and which is in use."""

    gains: list[_Amount]
    chosen: Annotated[int, msgspec.Meta(ge=0)]


class Arm(_Record, frozen=True, kw_only=True):
    """Rounds at one of several choices."""

    rounds: _Amount
    tokens: _Amount
    squares: _Amount
    milliseconds: _Amount


class EstimateSnapshot(_Record, frozen=True, kw_only=True):
    """Everything, for one pair of models on one machine."""

    version: Literal[1] = 1
    verify_cost: dict[Annotated[int, msgspec.Meta(ge=1)], _Tried]
    plain_cost: dict[Annotated[int, msgspec.Meta(ge=1)], _Tried]
    calibrations: dict[Origin, Shares]
    after_rejection: dict[Origin, Shares]
    after_all: dict[Origin, Shares]
    idle_ms: dict[Origin, Average]
    acceptance: dict[Origin, Average]
    tree_step_ms: Average
    backup_ms: Average
    reach: _Amount
    """The longest draft that was worth verifying."""
    trials: dict[Mode, Trial]
    step_cost: Line | None = None
    width: Widths | None = None
    backups: Shares | None = None
    """Draft tokens of backups: one place."""
    crowd_trials: dict[str, Trial] = {}
    """By mode and size of the crowd, as `ssd 3`."""
    saguaro: dict[str, Arm] = {}
    """By the weight C, as `0.4`."""
