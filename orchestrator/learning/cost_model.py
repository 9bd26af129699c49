"""What the orchestrator learns while it works: verification cost, and how drafts fare.

Shared by all requests of a stack. Pure: fed with events, asked for numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol, TypeVar

from orchestrator.learning.backup_rate import BackupRate
from orchestrator.learning.batch_estimates import BatchEstimates, Passes
from orchestrator.learning.calibration import Calibration
from orchestrator.learning.ema import Ema
from orchestrator.learning.fan_out import AFTER_ALL, AFTER_REJECTION, acceptance_law, hit_chances
from orchestrator.learning.hit_curve import HitCurve
from orchestrator.learning.saguaro import SaguaroChoice
from orchestrator.learning.snapshot import EstimateSnapshot
from orchestrator.learning.speculation_switch import SpeculationSwitch
from orchestrator.learning.step_cost import StepCost
from orchestrator.learning.tree_width import WIDTHS, TreeWidth, between, worth_of_depths
from orchestrator.learning.verify_cost import VerifyCost
from protocol.messages import Mode, Origin

ORIGINS: tuple[Origin, ...] = ("target", "hit", "miss", "lookup")

Remembered_contra = TypeVar("Remembered_contra", contravariant=True)
Remembered = TypeVar("Remembered")

_UNSEEN_RATE = 0.5
"""Assumed acceptance rate of a draft token."""

_REACH, _RELAX = 2.0, 0.05
"""Assumed longest draft that is worth verifying, and by how much it shrinks per round unused."""

_SHORTEST_MS = 1e-3
"""A clock may be too coarse to see a tree step."""

_HOPED = 0.85
_LONGEST_REACH = 64.0
"""Longest reach that is believed if remembered."""


@dataclass(frozen=True)
class RoundObservation:
    """What one round taught."""

    mode: Mode
    by_hand: bool
    """Whether the lookahead was fixed: then its speed is not the planner's doing."""
    speculating: bool
    """Whether a drafter worked for it, or beside it."""
    origin: Origin
    """Where its chain came from."""
    confidences: Sequence[float]
    """Of the draft tokens that were verified."""
    accepted: int
    prepared: int
    """How many bonus tokens were prepared for at this acceptance length."""
    rank: int | None
    """Which of them it was, 0 for the best; None if none of them."""
    verify_ms: float
    idle_ms: float | None
    """Between the verification before and this one; None for a request's first."""
    tried_saguaro: float | None = None
    """C that was chosen for the request; None if it was not the planner's choice."""
    sequences: int = 1
    """How many requests shared the pass."""
    all_tokens: int = 0
    """Tokens of all their chains; 0 stands for this chain's own."""
    untried: tuple[float, bool] | None = None
    """Confidence of the first token of a lookup that was not verified, and whether it was right."""

    @property
    def tokens(self) -> int:
        """Of the chain."""
        return len(self.confidences) + 1

    @property
    def rows(self) -> int:
        """Tokens of the pass."""
        return self.all_tokens or self.tokens


class CostModel:
    """Everything that is learned, for the planner."""

    def __init__(self) -> None:
        self.verify_cost = VerifyCost()
        """While a drafter works beside the target, which may slow it down."""
        self.plain_cost = VerifyCost()
        self.calibrations: dict[Origin, Calibration] = {origin: Calibration() for origin in ORIGINS}
        self.after_rejection: dict[Origin, HitCurve] = {
            origin: HitCurve(AFTER_REJECTION) for origin in ORIGINS
        }
        self.after_all: dict[Origin, HitCurve] = {origin: HitCurve(AFTER_ALL) for origin in ORIGINS}
        self.idle_ms: dict[Origin, Ema] = {origin: Ema() for origin in ORIGINS}
        self.acceptance: dict[Origin, Ema] = {origin: Ema(_UNSEEN_RATE) for origin in ORIGINS}
        """alpha: share of the draft tokens that were looked at and accepted."""
        self.tree_step_ms = Ema()
        """T_d(B): one depth of all branches."""
        self.backup_ms = Ema()
        """Per token drafted while the target waited."""
        self._backups = BackupRate()
        self.step_cost = StepCost()
        """T_d(B) by the number of branches."""
        self.width = TreeWidth()
        self.reach = _REACH
        """Longest draft that was verified of late."""
        self.paces: dict[Mode, SpeculationSwitch] = {
            "sd": SpeculationSwitch(),
            "ssd": SpeculationSwitch(),
        }
        """Of a request that is alone."""
        self.saguaro = SaguaroChoice()
        self.crowd = BatchEstimates()
        self._passes: Passes[RoundObservation] = Passes()

    def pace(self, mode: Mode) -> SpeculationSwitch | None:
        """Whether speculation pays now; None for plain decoding."""
        return self.crowd.pace(mode, self.paces)

    def new_text(self, mode: Mode) -> None:
        """A request of this mode is about to start."""
        if (pace := self.paces.get(mode)) is not None:
            pace.new_text()

    @property
    def draft_token_ms(self) -> float:
        """What a token costs that is drafted while the target waits."""
        return self.backup_ms.value or self.step_cost.of(1)

    @property
    def backup_rate(self) -> float:
        """Rate at which the tokens of a backup are accepted; that of hits until it is known."""
        # Without trees there are no hits to go by: hope, and see.
        alike = self.acceptance["hit"].value if self.step_cost.known else _HOPED
        return self._backups.given(alike)

    def observe_round(self, lesson: RoundObservation) -> None:
        """Take in one round."""
        self.reach = max(len(lesson.confidences), self.reach - _RELAX)
        cost = self.verify_cost if lesson.speculating else self.plain_cost
        cost.observe(lesson.rows, lesson.verify_ms)
        self.crowd.meet(lesson)
        self.calibrations[lesson.origin].observe(lesson.confidences, lesson.accepted)
        if lesson.untried is not None:
            confidence, right = lesson.untried
            self.calibrations["lookup"].observe([confidence], int(right))
        self._backups.fade()
        if lesson.origin == "miss":
            self._backups.observe(len(lesson.confidences), lesson.accepted)
        for index in range(min(lesson.accepted + 1, len(lesson.confidences))):
            self.acceptance[lesson.origin].observe(float(index < lesson.accepted))
        if lesson.prepared:
            rejected = lesson.accepted < len(lesson.confidences)
            curves = self.after_rejection if rejected else self.after_all
            curves[lesson.origin].observe(lesson.rank, lesson.prepared)
        if lesson.idle_ms is not None:
            self.idle_ms[lesson.origin].observe(lesson.idle_ms)
            if lesson.tried_saguaro is not None and lesson.speculating:
                time_ms = lesson.idle_ms + lesson.verify_ms
                self.saguaro.observe(lesson.tried_saguaro, lesson.accepted + 1, time_ms)
        if shared := self._passes.complete(lesson):
            self._judge(shared)

    def _judge(self, shared: Sequence[RoundObservation]) -> None:
        """Tell the pace what a pass has brought."""
        mode = shared[0].mode
        pace = self.pace(mode)
        idle_ms = next((part.idle_ms for part in shared if part.idle_ms is not None), None)
        if pace is None or idle_ms is None:
            return
        # A round without a drafter, or begun before the pace changed, says nothing about it.
        if any(
            part.by_hand or part.mode != mode or part.speculating != pace.speculating
            for part in shared
        ):
            return
        # Nor does a lookup, which there is with and without a drafter. In a crowd that
        # speculates nearly every pass may have one, and the pace must not go blind.
        crowded = pace.speculating and len(shared) > 1
        if not crowded and any(part.origin == "lookup" for part in shared):
            return
        tokens = sum(part.accepted + 1 for part in shared) / self.crowd.scale
        drafted = [part.accepted for part in shared if part.origin != "lookup"]
        pace.observe(tokens, idle_ms + shared[0].verify_ms, sum(drafted), len(drafted))
        alone = len(shared) == self.crowd.streams == 1
        if alone and mode == "ssd" and pace.speculating and self.step_cost.known:
            self.width.consider(self._gains_by_width(shared[0], pace.speculative_tok_s / 1e3))

    def drew(self, depth: int, branches: int, milliseconds: float) -> None:
        """The drafter took so long for one depth of a tree."""
        if self.crowd.streams == 1:  # in a crowd a step is for the branches of all
            self.step_cost.observe(depth, branches, milliseconds)
        if depth > 1:  # the first depth also takes in the chain
            self.tree_step_ms.observe(milliseconds)

    def _gains_by_width(self, lesson: RoundObservation, speed: float) -> list[float]:
        """What preparing beside this round gains by each of WIDTHS: hits, times their depth."""
        rates = [self.calibrations[lesson.origin].rate(c) for c in lesson.confidences]
        hits = hit_chances(
            acceptance_law(rates),
            WIDTHS[-1],
            self.after_rejection[lesson.origin],
            self.after_all[lesson.origin],
        )
        deepest = ceil(self.reach) + 2
        costs = [self.verify_cost.of(drafted + 1) for drafted in range(deepest + 1)]
        worth = worth_of_depths(self.acceptance["hit"].value, speed, costs)
        time_ms = lesson.verify_ms + self.idle_ms["hit"].value - self.step_cost.chain_ms
        steps = [max(_SHORTEST_MS, self.step_cost.of(branches)) for branches in WIDTHS]
        depths = [between(worth, time_ms / step) for step in steps]
        return [hits[b] * depth for b, depth in zip(WIDTHS, depths, strict=True)]

    def memory(self) -> EstimateSnapshot:
        """What is worth remembering for another run."""
        return EstimateSnapshot(
            verify_cost=self.verify_cost.memory(),
            plain_cost=self.plain_cost.memory(),
            calibrations={origin: one.memory() for origin, one in self.calibrations.items()},
            after_rejection={origin: one.memory() for origin, one in self.after_rejection.items()},
            after_all={origin: one.memory() for origin, one in self.after_all.items()},
            idle_ms={origin: one.memory() for origin, one in self.idle_ms.items()},
            acceptance={origin: one.memory() for origin, one in self.acceptance.items()},
            tree_step_ms=self.tree_step_ms.memory(),
            backup_ms=self.backup_ms.memory(),
            reach=self.reach,
            trials={mode: pace.memory() for mode, pace in self.paces.items()},
            step_cost=self.step_cost.memory(),
            width=self.width.memory(),
            backups=self._backups.memory(),
            crowd_trials=self.crowd.memory(),
            saguaro=self.saguaro.memory(),
        )

    def begin(self, remembered: EstimateSnapshot | None) -> None:
        """Forget all, then begin with what was remembered, which counts for little."""
        # In place: the plans of running requests hold this object.
        fresh = {name: value for name, value in vars(CostModel()).items() if name != "crowd"}
        vars(self).update(fresh)
        self.crowd.recall(remembered.crowd_trials if remembered is not None else {})
        if remembered is None:
            return
        self.verify_cost.recall(remembered.verify_cost)
        self.plain_cost.recall(remembered.plain_cost)
        self.tree_step_ms.recall(remembered.tree_step_ms)
        self.backup_ms.recall(remembered.backup_ms)
        self.reach = min(remembered.reach, _LONGEST_REACH)
        _recall(self.calibrations, remembered.calibrations)
        _recall(self.after_rejection, remembered.after_rejection)
        _recall(self.after_all, remembered.after_all)
        _recall(self.idle_ms, remembered.idle_ms)
        _recall(self.acceptance, remembered.acceptance)
        _recall(self.paces, remembered.trials)
        self.saguaro.recall(remembered.saguaro)
        if remembered.step_cost is not None:
            self.step_cost.recall(remembered.step_cost)
        if remembered.width is not None:
            self.width.recall(remembered.width)
        if remembered.backups is not None:
            self._backups.recall(remembered.backups)


class _Learner(Protocol[Remembered_contra]):
    def recall(self, remembered: Remembered_contra) -> None: ...


def _recall(
    learners: Mapping[Any, _Learner[Remembered]], remembered: Mapping[Any, Remembered]
) -> None:
    for key, learner in learners.items():
        if key in remembered:
            learner.recall(remembered[key])
