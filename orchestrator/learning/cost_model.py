"""What the planner knows: T_v, T_d, acceptance by confidence, and hits by rank.

Shared by all requests of a stack. Pure: fed with events, asked for numbers.
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import TypeVar

from orchestrator.learning.averages import DiscountedRatio, Ema
from orchestrator.learning.calibration import Calibration
from orchestrator.learning.fan_out import AFTER_ALL, AFTER_REJECTION
from orchestrator.learning.hit_curve import HitCurve
from orchestrator.learning.latency import StepLatency, VerifyLatency
from orchestrator.learning.round_observation import RoundObservation
from orchestrator.learning.speculation_switch import SpeculationSwitch
from protocol.messages import Hello, Mode, Origin, PassTimes, Role

_GPUS = {"metal", "cuda"}
BRANCHES_ON_A_CPU, BRANCHES_ON_A_GPU = 8, 32
MOST_SPECULATING = 2
"""Requests that may run for speculation: with more, passes are shared and compute-bound."""
ORIGINS: tuple[Origin, ...] = ("target", "hit", "miss", "lookup")

_STALL = 1.5
"""What is beyond this multiple of a pass's or a wait's usual time is not counted."""
_LONGEST_COST = 4.0
"""Tokens of plain decoding that the start of a free run, or a wait besides its draft, may cost."""
_UNSEEN_RATE = 0.85
"""Assumed acceptance rate of a draft token, optimistic so that drafts are tried."""
_BACKUP_PRIOR, _BACKUP_FADE = 6.0, 0.99
"""Samples that this counts for where drafts are waited for; and what a round leaves of earlier
ones: bad luck must not decide for ever."""
_ASSUMED_LENGTH, _SHRINK = 2.0, 0.05
"""Assumed longest draft that is worth verifying, and by how much it shrinks per round unused."""
_CLEARLY = 1.1
"""By how much one way to draft must be better for it to take the place of the other."""

Estimate = TypeVar("Estimate")


def _by_origin(make: Callable[[], Estimate]) -> dict[Origin, Estimate]:
    return {origin: make() for origin in ORIGINS}


class CostModel:
    """Everything that is measured for the planner."""

    def __init__(self) -> None:
        self.streams = 1
        """How many requests run."""
        self.branches = BRANCHES_ON_A_CPU
        """B, the branches that the drafter prepares in a round."""
        self.verify_latency = VerifyLatency()
        """T_v beside a drafter at work, which may slow the target down."""
        self.plain_latency = VerifyLatency()
        """T_v while the drafter rests."""
        self.step_latency = StepLatency()
        self.calibrations = _by_origin(Calibration)
        self.after_rejection = _by_origin(lambda: HitCurve(AFTER_REJECTION))
        self.after_all = _by_origin(lambda: HitCurve(AFTER_ALL))
        self.hits = Ema(0.5, weight=3.0)
        """Share of the rounds with a drafter at work whose outcome was prepared for."""
        self.idle_ms = _by_origin(Ema)
        """How long the target waits for a round."""
        self.run_start_ms = Ema()
        """How much longer than others the first token of a free run takes, the wait included."""
        self.backup_ms = Ema()
        """Per token drafted while the target waited."""
        self.backup_idle_ms = Ema()
        """How much longer than the orchestrator the target waited for such a draft."""
        self.alpha = Ema(_UNSEEN_RATE)
        """Share of the first choices of prepared drafts that are accepted, of those judged."""
        self.backups = DiscountedRatio()
        """Accepted over offered tokens of drafts that were waited for."""
        self.drafter_is_late = False
        """Whether it did not deliver when it was waited for, nor anything since."""
        self.draft_length = _ASSUMED_LENGTH
        """Longest draft that was verified recently."""
        self.drafts_in_turn = False
        """Whether the drafter should rest while the target verifies, and be waited for."""
        self._switches: dict[tuple[Mode, int], SpeculationSwitch] = {}
        self._pass_times = PassTimes()
        self._models: dict[Role, tuple[str, str]] = {}

    def on_hello(self, hello: Hello) -> None:
        """Start from the verifier's passes at load; forget what was measured of another pair."""
        name = hello.backend, hello.model
        if self._models.setdefault(hello.role, name) != name:
            kept = {"streams": self.streams, "_models": {**self._models, hello.role: name}}
            times = self._pass_times
            # In place: the planners of running requests hold this object.
            vars(self).update(vars(CostModel()) | kept)
            self.expect_passes(times)
        if hello.role == "drafter":
            on_gpu = hello.compute_unit.partition(":")[0] in _GPUS  # "cuda:1" names a card
            self.branches = BRANCHES_ON_A_GPU if on_gpu else BRANCHES_ON_A_CPU
        else:
            self.expect_passes(hello.pass_times)

    def expect_passes(self, times: PassTimes) -> None:
        """Expect the target's passes to take as long as at load."""
        if times != self._pass_times:  # else what was measured since holds
            self._pass_times = times
            self.verify_latency.expect(times.chains)
            self.plain_latency.expect(times.chains)

    def switch(self, mode: Mode) -> SpeculationSwitch | None:
        """Return what decides whether to speculate; None: plain decoding, whatever pays."""
        if mode == "ar" or self.streams > MOST_SPECULATING:
            return None
        return self._switches.setdefault((mode, self.streams), SpeculationSwitch())

    def on_new_text(self, mode: Mode) -> None:
        """Prepare for a request of this mode."""
        for (of, _), switch in self._switches.items():
            if of == mode:
                switch.on_new_text()

    @property
    def draft_token_ms(self) -> float:
        """What a token costs that is drafted while the target waits.

        Half a step until one was: optimistic, so that it is tried. A step of many branches says
        little of one.
        """
        return self.backup_ms.value or 0.5 * self.step_latency.step_ms

    @property
    def wait_overhead_ms(self) -> float:
        """What it costs to wait for a draft besides its tokens: messages, and a pass asked late."""
        usual = max(self.idle_ms[origin].value for origin in ("hit", "target"))
        return max(0.0, self.backup_idle_ms.value - usual)

    @property
    def backup_rate(self) -> float:
        """Rate at which the tokens of a draft that is waited for are accepted."""
        whole = self.backups.whole + _BACKUP_PRIOR
        return (self.backups.part + _BACKUP_PRIOR * self.alpha.value) / whole

    def acceptance_rates(
        self, confidences: Sequence[float], parents: Sequence[int], origin: Origin
    ) -> list[float]:
        """Return, per draft token, the chance that it is accepted, given that its parent is.

        Siblings, of trees whose size is fixed by hand, share a probability of one.
        """
        rates: list[float] = []
        left: dict[int, float] = {}
        for confidence, parent in zip(confidences, parents, strict=True):
            if parent in left:
                rate = min(confidence, left[parent])
            else:
                rate = self.calibrations[origin].rate(confidence)
            left[parent] = left.get(parent, 1.0) - rate
            rates.append(rate)
        return rates

    # ------------------------------------------------------------ events

    def observe_round(self, seen: RoundObservation) -> None:
        """Take in one round."""
        latency = self.verify_latency if seen.beside else self.plain_latency
        usual_ms = latency.of(seen.rows)
        latency.observe(seen.rows, seen.verify_ms)
        self.draft_length = max(seen.depth, self.draft_length - _SHRINK)
        self._observe_drafts(seen)
        if seen.idle_ms is not None:
            self._observe_waits(seen, seen.idle_ms)
            self._judge_speed(seen, seen.idle_ms, usual_ms)
        self._compare_ways()

    def observe_step(self, depth: int, milliseconds: float) -> None:
        """Take in one depth of a tree that the drafter prepared."""
        if self.streams == 1:  # else a step is for the branches of several
            self.step_latency.observe(depth, milliseconds)

    def _observe_drafts(self, seen: RoundObservation) -> None:
        choices = seen.choices
        for confidence, stood in choices:
            self.calibrations[seen.origin].observe(confidence, accepted=stood)
            if seen.origin == "hit":
                self.alpha.observe(float(stood))
        if seen.unverified_lookup is not None:
            confidence, right = seen.unverified_lookup
            self.calibrations["lookup"].observe(confidence, accepted=right)
        waited = seen.origin == "miss"
        self.backups.observe(
            seen.accepted if waited else 0, len(choices) if waited else 0, fade=_BACKUP_FADE
        )
        if seen.prepared:
            curves = self.after_all if seen.all_stood else self.after_rejection
            curves[seen.origin].observe(seen.rank, seen.prepared)
        if seen.beside and seen.speculating:
            self.hits.observe(float(seen.rank is not None))

    def _observe_waits(self, seen: RoundObservation, idle_ms: float) -> None:
        self.idle_ms[seen.origin].observe(idle_ms)
        if seen.sequences > 1:
            return
        plain = not seen.speculating and seen.origin == "target"
        if plain and not seen.continues_run:
            longer_ms = idle_ms + seen.verify_ms - self.plain_latency.of(1)
            self.run_start_ms.observe(self._limit_cost(longer_ms))
        if seen.waited_ms:
            self.backup_idle_ms.observe(self._limit_cost(idle_ms - seen.waited_ms))

    def _limit_cost(self, milliseconds: float) -> float:
        """Return at least nothing, and no more than a few tokens of plain decoding take."""
        known = self.plain_latency.is_known
        most = _LONGEST_COST * self.plain_latency.of(1) if known else milliseconds
        return max(0.0, min(milliseconds, most))

    def _judge_speed(self, seen: RoundObservation, idle_ms: float, usual_ms: float) -> None:
        """Feed the switch with what a round brought, if that says anything about it."""
        switch = self.switch(seen.mode)
        # A round without a drafter, or begun before the switch changed, does not count; nor does
        # a lookup, which there is with and without a drafter.
        if switch is None or seen.by_hand or seen.speculating != switch.speculating:
            return
        if seen.origin == "lookup":
            return
        # A stall says nothing of the next round: a kernel is made, or others have taken a core.
        if self.streams == 1:
            usual_idle_ms = max(usual_ms, self.idle_ms[seen.origin].value)
            time_ms = min(idle_ms, _STALL * usual_idle_ms)
            time_ms += min(seen.verify_ms, _STALL * usual_ms)
        else:
            since_ms = seen.since_last_ms or idle_ms + seen.verify_ms
            time_ms = min(since_ms, _STALL * self.streams * usual_ms)
        switch.observe(seen.accepted + 1, time_ms, seen.accepted, now=seen.ended_at)

    def _compare_ways(self) -> None:
        """Choose between drafting beside verifications and in turn with them.

        Beside, a verification may take longer; in turn, the target waits also where the draft
        would have been ready.
        """
        beside, alone = self.verify_latency, self.plain_latency
        if not (beside.is_observed and alone.is_observed and self.draft_token_ms):
            return
        drafted = ceil(self.draft_length)
        lost_ms = beside.of(drafted + 1) - alone.of(drafted + 1)
        wait_ms = drafted * self.draft_token_ms + self.wait_overhead_ms
        least = 1.0 / _CLEARLY if self.drafts_in_turn else _CLEARLY
        self.drafts_in_turn = lost_ms > least * self.hits.value * wait_ms
