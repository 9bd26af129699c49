"""What the planner knows: how long passes take, and how drafts fare.

Shared by all requests of a stack. Pure: fed with events, asked for numbers.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from orchestrator.learning.averages import DiscountedRatio, Ema
from orchestrator.learning.batch_estimates import BatchEstimates, Passes
from orchestrator.learning.calibration import Calibration, acceptance_rates, calibrate_siblings
from orchestrator.learning.fan_out import AFTER_ALL, AFTER_REJECTION
from orchestrator.learning.handover import HandoverEstimates
from orchestrator.learning.hit_curve import HitCurve
from orchestrator.learning.latency import StepLatency, VerifyLatency
from orchestrator.learning.preparation_gains import PreparationGains
from orchestrator.learning.replay import RoundCosts, could_pay
from orchestrator.learning.round_observation import RoundObservation
from orchestrator.learning.speculation_switch import SpeculationSwitch
from orchestrator.learning.tree_growth import CostBehindTrees, TreeGrowth, TreeTrial, rank_chances
from protocol.messages import Hello, Mode, Origin, PassTimes, Role

_GPUS = {"metal", "cuda"}
BRANCHES_ON_A_CPU, BRANCHES_ON_A_GPU = 8, 32
_SPECULATIVE: tuple[Mode, ...] = ("sd", "ssd")
_STALL = 1.5
"""What is beyond this multiple of a pass's or a wait's usual time is not counted."""
_LONGEST_COST = 4.0
"""Tokens of plain decoding that the start of a free run, or a wait besides its draft, may cost."""
ORIGINS: tuple[Origin, ...] = ("target", "hit", "miss", "lookup")

Estimate = TypeVar("Estimate")

_UNSEEN_RATE = 0.5
"""Assumed acceptance rate of a draft token."""
_UNSEEN_BACKUP_RATE = 0.85
"""The same of a backup's tokens where no tree was seen: optimistic, so that it is tried."""
_BACKUP_PRIOR = 6.0
"""Samples that the assumed rate of backups counts for beside those seen."""
_BACKUP_FADE = 0.99
"""Per round, with or without a backup: an unlucky trial must not decide for ever."""

_ASSUMED_LENGTH, _SHRINK = 2.0, 0.05
"""Assumed longest draft that is worth verifying, and by how much it shrinks per round unused."""

MOST_SIBLINGS = 4
"""Runners-up that are asked for beside a draft token: later ones are hardly ever right."""


def _by_origin(make: Callable[[], Estimate]) -> dict[Origin, Estimate]:
    return {origin: make() for origin in ORIGINS}


def _by_mode(make: Callable[[], Estimate]) -> dict[Mode, Estimate]:
    return {mode: make() for mode in _SPECULATIVE}


class CostModel:
    """Everything that is measured for the planner."""

    def __init__(self) -> None:
        self.verify_latency = VerifyLatency()
        """While a drafter works beside the target, which may slow it down."""
        self.tree_latency = VerifyLatency(self.verify_latency)
        """The same of trees, whose passes may run through other kernels than those of chains."""
        self.plain_latency = VerifyLatency()
        self.calibrations = _by_origin(Calibration)
        """Of a drafter's first choices."""
        self.siblings = _by_origin(calibrate_siblings)
        """Of the runners-up beside them."""
        self.after_rejection = _by_origin(lambda: HitCurve(AFTER_REJECTION))
        self.after_all = _by_origin(lambda: HitCurve(AFTER_ALL))
        self.idle_ms = _by_origin(Ema)
        self.run_start_ms = Ema()
        """How much longer than others the first token of a free run takes, the wait included."""
        self.acceptance = _by_origin(lambda: Ema(_UNSEEN_RATE))
        """alpha: share of the first choices that were looked at and accepted."""
        self.tree_step_ms = Ema()
        """T_d(B): one depth of all branches."""
        self.backup_ms = Ema()
        """Per token drafted while the target waited."""
        self.backup_idle_ms = Ema()
        """How much longer than the orchestrator the target waited for such a draft."""
        self._backups = DiscountedRatio()  # depths: accepted of offered
        self.step_latency = StepLatency()  # T_d(B) by the number of branches
        self.drafter_is_late = False
        """Whether it did not deliver when it was waited for, nor anything since."""
        self.branches = BRANCHES_ON_A_CPU
        """B, the branches that the drafter prepares in a round."""
        self.tree_growth, self.behind_trees = TreeGrowth(), CostBehindTrees()
        self.tree_trials = _by_mode(TreeTrial)
        self.draft_length = _ASSUMED_LENGTH
        """Longest draft that was verified recently."""
        self.switches = _by_mode(SpeculationSwitch)
        """Of a request that is alone."""
        self.batch = BatchEstimates()
        self.handover = HandoverEstimates()
        self._passes: Passes[RoundObservation] = Passes()
        self._pass_times = PassTimes()
        self._models: dict[Role, tuple[str, str]] = {}

    def on_hello(self, hello: Hello) -> None:
        """Start from the verifier's passes at load; forget what was measured of another pair."""
        name = hello.backend, hello.model
        if self._models.setdefault(hello.role, name) != name:
            times, batch = self._pass_times, self.batch
            self._models[hello.role] = name
            # In place: the planners of running requests hold this object.
            vars(self).update(vars(CostModel()) | {"batch": batch, "_models": self._models})
            self.expect_passes(times)
        if hello.role == "drafter":
            on_gpu = hello.compute_unit in _GPUS
            self.branches = BRANCHES_ON_A_GPU if on_gpu else BRANCHES_ON_A_CPU
        else:
            self.expect_passes(hello.pass_times)

    def expect_passes(self, times: PassTimes) -> None:
        """Expect the target's passes to take as long as at load."""
        if times == self._pass_times:
            return  # what was measured since holds
        self._pass_times = times
        self.verify_latency.expect(times.chains)
        self.plain_latency.expect(times.chains)
        self.tree_latency.expect(times.trees)

    def switch(self, mode: Mode) -> SpeculationSwitch | None:
        """Whether speculation pays now; None for plain decoding."""
        return self.batch.switch(mode, self.switches, self._can_pay)

    def _can_pay(self, mode: Mode) -> bool:
        """Whether drafts could pay in a batch, if each request had as many accepted as alone.

        For a pass that verifies one draft token of each, since more are seldom worth it there.
        """
        accepted, streams = self.switches[mode].accepted_per_round, self.batch.streams
        if accepted is None or not self.plain_latency.is_observed:
            return True
        cost = self.verify_latency.of(2 * streams) / self.plain_latency.of(streams)
        return 1.0 + accepted > cost

    def latency(self, *, speculating: bool, tree: bool) -> VerifyLatency:
        """T_v(m) beside a drafter at work or without, of chains or of trees."""
        if not speculating:
            return self.plain_latency
        return self.tree_latency if tree else self.verify_latency

    def on_new_text(self, mode: Mode) -> None:
        """A request of this mode is about to start."""
        if (switch := self.switches.get(mode)) is not None:
            switch.on_new_text()

    def asks_for_trees(self, mode: Mode) -> bool:
        """Whether runners-up are asked for; tried with a request that is alone only."""
        trial = self.tree_trials.get(mode)
        return trial is not None and (trial.asks if self.batch.streams == 1 else trial.pays)

    @property
    def draft_token_ms(self) -> float:
        """What a token costs that is drafted while the target waits.

        Half a step until one was: optimistic, so that it is tried. A step of many branches says
        little of one, and the target's core may help with that one.
        """
        return self.backup_ms.value or 0.5 * self.step_latency.of(1)

    @property
    def wait_overhead_ms(self) -> float:
        """What it costs to wait for a draft besides its tokens: messages, and a pass asked late."""
        usual = max(self.idle_ms[origin].value for origin in ("hit", "target"))
        return max(0.0, self.backup_idle_ms.value - usual)

    @property
    def backup_rate(self) -> float:
        """Rate at which the tokens of a backup are accepted; that of hits until it is known."""
        known = self.step_latency.is_known  # without trees there are no hits to go by
        assumed = self.acceptance["hit"].value if known else _UNSEEN_BACKUP_RATE
        return self._backups.with_prior(assumed, _BACKUP_PRIOR)

    def acceptance_rates(
        self, confidences: Sequence[float], parents: Sequence[int], origin: Origin
    ) -> list[float]:
        """Per draft token, the probability that it is accepted, given that its parent is."""
        first, siblings = self.calibrations[origin], self.siblings[origin]
        return acceptance_rates(confidences, parents, first, siblings)

    # ------------------------------------------------------------ events

    def observe_round(self, seen: RoundObservation) -> None:
        """Take in one round."""
        self.draft_length = max(seen.depth, self.draft_length - _SHRINK)
        latency = self.latency(speculating=seen.speculating, tree=seen.is_tree)
        self.behind_trees.observe(seen, latency.of(seen.rows))
        latency.observe(seen.rows, seen.verify_ms)
        if seen.mode in self.tree_trials:
            self.tree_trials[seen.mode].note_round(seen)
        self.batch.observe(seen, free_ms=self.plain_latency.of(self.batch.streams))
        self.handover.observe(seen)
        choices = seen.choices
        self._observe_acceptance(seen, choices)
        self._observe_ranks(seen, choices)
        if seen.idle_ms is not None:
            self.idle_ms[seen.origin].observe(seen.idle_ms)
            plain = seen.sequences == 1 and not seen.speculating
            if plain and seen.origin == "target" and not seen.continues_run:
                longer_ms = seen.idle_ms + seen.verify_ms - self.plain_latency.of(1)
                self.run_start_ms.observe(self._limit_cost(longer_ms))
            if seen.waited_ms and seen.sequences == 1:
                self.backup_idle_ms.observe(self._limit_cost(seen.idle_ms - seen.waited_ms))
        if shared := self._passes.complete(seen):
            self._observe_pass(shared)

    def _observe_acceptance(
        self, seen: RoundObservation, choices: Sequence[tuple[list[float], int | None]]
    ) -> None:
        first, siblings = self.calibrations[seen.origin], self.siblings[seen.origin]
        for confidences, chosen in choices:
            first.observe(confidences[0], accepted=chosen == 0)
            for place, confidence in enumerate(confidences[1:], 1):
                siblings.observe(confidence, accepted=chosen == place)
            self.acceptance[seen.origin].observe(float(chosen == 0))
        for confidence, right in seen.unverified:
            siblings.observe(confidence, accepted=right)
        if seen.unverified_lookup is not None:
            confidence, right = seen.unverified_lookup
            self.calibrations["lookup"].observe(confidence, accepted=right)
        backed_up = seen.origin == "miss"
        self._backups.observe(
            seen.accepted if backed_up else 0, len(choices) if backed_up else 0, fade=_BACKUP_FADE
        )

    def _observe_ranks(
        self, seen: RoundObservation, choices: Sequence[tuple[list[float], int | None]]
    ) -> None:
        """Which candidate the target chose where it did not choose the first one."""
        after_rejection = self.after_rejection[seen.origin]
        for confidences, chosen in choices:
            if chosen:
                after_rejection.observe(chosen - 1, len(confidences) - 1)
        if not choices or choices[-1][1] is not None:
            if seen.prepared:
                self.after_all[seen.origin].observe(seen.rank, seen.prepared)
            return
        skipped = len(choices[-1][0]) - 1
        if seen.prepared or skipped:
            after_rejection.observe(seen.rank, seen.prepared, skipped=skipped)

    def _observe_pass(self, shared: Sequence[RoundObservation]) -> None:
        """Feed the switch with what a pass brought, if that says anything about it."""
        mode = shared[0].mode
        switch = self.switch(mode)
        idle_ms = next((part.idle_ms for part in shared if part.idle_ms is not None), None)
        if switch is None or idle_ms is None:
            return
        # A round without a drafter, or begun before the switch changed, does not count.
        if any(
            part.by_hand or part.mode != mode or part.speculating != switch.speculating
            for part in shared
        ):
            return
        # Nor does a lookup, which there is with and without a drafter. In a batch that
        # speculates nearly every pass may have one, and the switch must not go blind.
        batched = switch.speculating and len(shared) > 1
        if not batched and any(part.origin == "lookup" for part in shared):
            if len(shared) > 1:
                switch.on_other_round()
            return
        tokens = sum(part.accepted + 1 for part in shared) / self.batch.scale
        drafted = [part.accepted for part in shared if part.origin != "lookup"]
        if switch.speculating:
            switch.freshness.observe(shared[0].rows, shared[0].verify_ms)
        time_ms = self._leave_out_stalls(shared[0], idle_ms)
        switch.observe(tokens, time_ms, sum(drafted), len(drafted), now=shared[0].ended_at)
        if len(shared) == self.batch.streams == 1 and switch.speculating:
            self._observe_alone(shared[0], time_ms, switch.speculative_tok_s / 1e3)

    def _observe_alone(self, seen: RoundObservation, time_ms: float, speed: float) -> None:
        """What a round says of preparing for the next one; `speed` in tokens per millisecond."""
        if seen.chooses_trees:
            self.tree_trials[seen.mode].observe(seen.accepted + 1, time_ms)
        if seen.mode == "ssd" and self.step_latency.is_known:
            gains = PreparationGains(self)
            self.handover.observe_delay(gains.cost_of_delay(seen, speed))
            if self.verify_latency.has_cheap_rows and self.tree_growth.is_due():
                self.tree_growth.observe(gains.by_growth(seen, speed))

    def _leave_out_stalls(self, seen: RoundObservation, idle_ms: float) -> float:
        """Time of a pass and the wait before it, without what says nothing of the next one.

        A kernel is made, or others have taken a core: three of these ended trials that were ahead.
        """
        usual_ms = self.latency(speculating=seen.speculating, tree=seen.is_tree).of(seen.rows)
        usual_idle_ms = max(usual_ms, self.idle_ms[seen.origin].value)
        return min(idle_ms, _STALL * usual_idle_ms) + min(seen.verify_ms, _STALL * usual_ms)

    def _limit_cost(self, milliseconds: float) -> float:
        """At least nothing, and no more than a few tokens of plain decoding take."""
        known = self.plain_latency.is_known
        longest_ms = _LONGEST_COST * self.plain_latency.of(1) if known else milliseconds
        return max(0.0, min(milliseconds, longest_ms))

    def observe_replay(self, mode: Mode, foreseen: int, replayed: int) -> None:
        """A drafter that was left out says how well it would have drafted what was decoded."""
        switch = self.switches.get(mode)
        if switch is None or self.batch.streams > 1 or not switch.plain_tok_s:
            return
        hits, idle_ms = self.handover.hit_rate, self.idle_ms
        wait_ms = hits * idle_ms["hit"].value + (1.0 - hits) * idle_ms["miss"].value
        costs = RoundCosts(1e3 / switch.plain_tok_s, self.verify_latency.of, wait_ms)
        if not could_pay(foreseen, replayed, costs):
            switch.call_off_trial()

    def observe_step(self, depth: int, branches: int, milliseconds: float) -> None:
        """The drafter took this long for one depth of a tree."""
        if self.batch.streams == 1:  # in a batch a step is for the branches of all
            self.step_latency.observe(depth, branches, milliseconds)
        if depth > 1:  # the first depth also takes in the chain
            self.tree_step_ms.observe(milliseconds)

    @property
    def rank_chances(self) -> list[float]:
        """How likely the target's token is the first, second, ... choice of a prepared draft."""
        curve = self.after_rejection["hit"]
        hits = [curve.hit(count) for count in range(MOST_SIBLINGS + 1)]
        return rank_chances(self.acceptance["hit"].value, hits)
