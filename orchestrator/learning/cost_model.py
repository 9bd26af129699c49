"""Estimates for the planner: T_v, T_d, acceptance by confidence, and hits by rank.

Shared by all requests of a stack. Pure: it consumes events and answers queries.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

from orchestrator.learning.averages import FADE, PRIOR, DiscountedRatio, Ema
from orchestrator.learning.calibration import Calibration
from orchestrator.learning.fan_out import AFTER_ALL, AFTER_REJECTION
from orchestrator.learning.hit_curve import HitCurve
from orchestrator.learning.latency import STALL, StepLatency, VerifyLatency
from orchestrator.learning.round_observation import RoundObservation
from orchestrator.learning.schedule import ASSUMED_HITS, plan_schedule
from orchestrator.learning.speculation_switch import SpeculationSwitch
from protocol.messages import Hello, Mode, Origin, PassTimes, Role, Schedule

_GPUS = {"metal", "cuda"}
BRANCHES_ON_A_CPU, BRANCHES_ON_A_GPU = 8, 32
MOST_SPECULATING = 2
"""Most concurrent requests with speculation: with more, passes are shared and compute-bound."""
ORIGINS: tuple[Origin, ...] = ("target", "hit", "miss", "lookup")

_LONGEST_COST = 4.0
"""Cap of the cost of starting a free run, or of waiting besides drafting, in plain tokens."""
_UNSEEN_RATE = 0.85
"""Assumed acceptance rate of a draft token, optimistic so that drafts are tried."""
_ASSUMED_LENGTH, _SHRINK = 2.0, 0.05
"""Assumed longest draft that is worth verifying, and its decay per round in which it is not
used.
"""
_CLEARLY = 1.1
"""Advantage that one way to draft needs to replace the other."""

Estimate = TypeVar("Estimate")


def _by_origin(make: Callable[[], Estimate]) -> dict[Origin, Estimate]:
    return {origin: make() for origin in ORIGINS}


class CostModel:
    """All measurements for the planner."""

    def __init__(self) -> None:
        self.streams = 1
        """Number of running requests."""
        self.branches = BRANCHES_ON_A_CPU
        """B, the branches that the drafter prepares in a round."""
        self.verify_latency = VerifyLatency()
        """T_v while the drafter works, which may slow the target down."""
        self.plain_latency = VerifyLatency()
        """T_v while the drafter is idle."""
        self.step_latency = StepLatency()
        self.calibrations = _by_origin(Calibration)
        self.after_rejection = _by_origin(lambda: HitCurve(AFTER_REJECTION))
        self.after_all = _by_origin(lambda: HitCurve(AFTER_ALL))
        self.hits = Ema(ASSUMED_HITS, weight=3.0)
        """Hit rate of rounds with a working drafter."""
        self.recent = DiscountedRatio()
        """Tokens and milliseconds of recent rounds of all kinds."""
        self.idle_ms = _by_origin(Ema)
        """Idle time of the target before a round."""
        self.run_start_ms, self.run_idle_ms = Ema(), Ema()
        """Extra time of the first token of a free run, the wait included; idle time within runs."""
        self.backup_ms, self.backup_start_ms = Ema(), Ema()
        """Time per token drafted while the target waited; extra time of a draft's first token."""
        self.backup_idle_ms = Ema()
        """Extra time that the target, compared with the orchestrator, waited for such a draft."""
        self.alpha = Ema(_UNSEEN_RATE)
        """Acceptance rate of the first choices of prepared drafts, of those that were judged."""
        self.backups = DiscountedRatio()
        """Accepted over offered tokens of awaited drafts."""
        self.drafter_is_late = False
        """True if the drafter did not deliver when awaited, nor anything since."""
        self.draft_length = _ASSUMED_LENGTH
        """Longest draft that was verified recently."""
        self.drafts_in_turn = False
        """True if the drafter should rest during verifications: at first if both share cores."""
        self._switches: dict[tuple[Mode, int], SpeculationSwitch] = {}
        self._pass_times: dict[Role, PassTimes] = {}
        self._models: dict[Role, tuple[str, str]] = {}
        self._units: dict[Role, str] = {}

    def on_hello(self, hello: Hello) -> None:
        """Start from what the services timed; forget measurements of another pair."""
        name = hello.backend, hello.model
        if self._models.setdefault(hello.role, name) != name:
            models = {**self._models, hello.role: name}
            kept = {"streams": self.streams, "_models": models, "_units": self._units}
            times = dict(self._pass_times)
            times.pop(hello.role, None)
            # In place: the planners of running requests hold this object.
            vars(self).update(vars(CostModel()) | kept)
            for role, measured in times.items():
                self.expect_passes(measured, role)
        self._units[hello.role] = hello.compute_unit if hello.backend != "remote" else "remote"
        self.drafts_in_turn = self._units.get("verifier") == self._units.get("drafter")
        if hello.role == "drafter":
            on_gpu = hello.compute_unit.partition(":")[0] in _GPUS  # "cuda:1" names a card
            self.branches = BRANCHES_ON_A_GPU if on_gpu else BRANCHES_ON_A_CPU
        self.expect_passes(hello.pass_times, hello.role)

    def expect_passes(self, times: PassTimes, role: Role = "verifier") -> None:
        """Expect the passes of a model to take as long as these, if there are any."""
        if not times.chains or times == self._pass_times.get(role):
            return  # the measurements since hold
        self._pass_times[role] = times
        if role == "drafter":
            self.backup_ms = Ema(times.chains.get(1, 0.0), weight=1.0)
        else:
            self.plain_latency.expect(times.chains)
            uncontended = self.plain_latency if times.contended else None
            self.verify_latency.expect(times.contended or times.chains, uncontended)
        self._compare_ways()

    def switch(self, mode: Mode) -> SpeculationSwitch | None:
        """Return the switch of a mode; None: plain decoding, regardless of gain."""
        if mode == "ar" or self.streams > MOST_SPECULATING:
            return None
        return self._switches.setdefault((mode, self.streams), SpeculationSwitch())

    def on_new_text(self, mode: Mode) -> Schedule | None:
        """Prepare for a request of this mode: it speculates if good drafts may pay.

        Returns:
            The schedule to expect of usual drafts; None before passes and drafts were timed.
        """
        is_known = mode != "ar" and self.plain_latency.is_known and self.draft_token_ms > 0.0
        hits = ASSUMED_HITS if mode == "ssd" else 0.0
        may_gain = not is_known or self._plan_schedule(_UNSEEN_RATE, hits).way != "plain"
        hits = 0.0 if mode == "sd" or self.drafts_in_turn else self.hits.value
        planned = self._plan_schedule(self.backup_rate, hits, **self._besides) if is_known else None
        gain = 1.0 if planned is None else planned.gain
        for streams in range(1, MOST_SPECULATING + 1):
            switch = self._switches.setdefault((mode, streams), SpeculationSwitch())
            switch.on_new_text(may_gain=may_gain, gain=gain)
        return planned

    @property
    def draft_token_ms(self) -> float:
        """Cost of a token that is drafted while the target waits.

        Half a step before the first one: optimistic, so that it is tried. A step of many branches
        says little about one.
        """
        return self.backup_ms.value or 0.5 * self.step_latency.step_ms

    @property
    def wait_overhead_ms(self) -> float:
        """Cost of waiting for a draft, excluding its tokens: messages, what the drafter has to read
        first, and a late request to the target.
        """
        usual = max(self.idle_ms[origin].value for origin in ("hit", "target"))
        return max(0.0, self.backup_idle_ms.value - usual) + max(0.0, self.backup_start_ms.value)

    @property
    def _besides(self) -> dict[str, float]:
        """Arguments of a schedule: what rounds and waits cost besides passes and tokens."""
        return {"exchange_ms": self.idle_ms["hit"].value, "wait_ms": self.wait_overhead_ms}

    @property
    def backup_rate(self) -> float:
        """Acceptance rate of the tokens of an awaited draft."""
        whole = self.backups.whole + PRIOR
        return (self.backups.part + PRIOR * self.alpha.value) / whole

    def acceptance_rates(
        self, confidences: Sequence[float], parents: Sequence[int], origin: Origin
    ) -> list[float]:
        """Return the acceptance rate of each draft token, given that its parent is accepted.

        Siblings, in trees of a fixed size, share a total probability of one.
        """
        calibration = self.calibrations[origin]
        by_confidence = {sure: calibration.rate(sure) for sure in set(confidences)}
        rates: list[float] = []
        left: dict[int, float] = {}
        for confidence, parent in zip(confidences, parents, strict=True):
            is_first = parent not in left
            rate = by_confidence[confidence] if is_first else min(confidence, left[parent])
            left[parent] = left.get(parent, 1.0) - rate
            rates.append(rate)
        return rates

    # ------------------------------------------------------------ events

    def observe_round(self, observation: RoundObservation) -> None:
        """Add a round."""
        latency = self.verify_latency if observation.is_contended else self.plain_latency
        usual_ms = latency.of(observation.rows)
        latency.observe(observation.rows, observation.verify_ms)
        if observation.origin != "lookup":
            self.draft_length = max(observation.depth, self.draft_length - _SHRINK)
        self._observe_drafts(observation)
        if observation.idle_ms is not None:
            time_ms = min(observation.idle_ms + observation.verify_ms, STALL * usual_ms)
            self.recent.observe(observation.accepted + 1, time_ms, fade=FADE)
            self._observe_waits(observation, observation.idle_ms)
            self._judge_speed(observation, observation.idle_ms, usual_ms)
        self._compare_ways()

    def observe_step(self, depth: int, milliseconds: float) -> None:
        """Add one depth of a tree that the drafter prepared."""
        if self.streams == 1:  # otherwise a step serves the branches of several requests
            self.step_latency.observe(depth, milliseconds)

    def observe_wait(self, depth: int, first_ms: float, waited_ms: float) -> None:
        """Add a draft that the target waited for.

        Args:
            depth: tokens of the draft.
            first_ms: time until the first one.
            waited_ms: time until the last one.
        """
        if "drafter" not in self._pass_times:  # a program's tokens may come all at once
            self.backup_ms.observe(waited_ms / depth)
            return
        if depth > 1:
            self.backup_ms.observe(self._limit_cost((waited_ms - first_ms) / (depth - 1)))
        self.backup_start_ms.observe(self._limit_cost(first_ms - self.backup_ms.value))

    def _observe_drafts(self, observation: RoundObservation) -> None:
        choices = observation.choices
        for confidence, stood in choices:
            self.calibrations[observation.origin].observe(confidence, accepted=stood)
            if observation.origin == "hit":
                self.alpha.observe(float(stood))
        if observation.unverified_lookup is not None:
            confidence, right = observation.unverified_lookup
            self.calibrations["lookup"].observe(confidence, accepted=right)
        waited = observation.origin == "miss"
        self.backups.observe(
            observation.accepted if waited else 0, len(choices) if waited else 0, fade=FADE
        )
        if observation.prepared:
            curves = self.after_all if observation.all_stood else self.after_rejection
            curves[observation.origin].observe(observation.rank, observation.prepared)
        if observation.is_contended and observation.speculating:
            self.hits.observe(float(observation.rank is not None))

    def _observe_waits(self, observation: RoundObservation, idle_ms: float) -> None:
        self.idle_ms[observation.origin].observe(idle_ms)
        if observation.sequences > 1:
            return
        if observation.continues_run:
            self.run_idle_ms.observe(idle_ms)
        elif not observation.speculating and observation.origin == "target":
            longer_ms = idle_ms + observation.verify_ms - self.plain_latency.of(1)
            self.run_start_ms.observe(self._limit_cost(longer_ms))
        if observation.waited_ms:
            self.backup_idle_ms.observe(self._limit_cost(idle_ms - observation.waited_ms))

    def _limit_cost(self, milliseconds: float) -> float:
        """Clamp a cost between zero and a few tokens of plain decoding."""
        is_known = self.plain_latency.is_known
        most = _LONGEST_COST * self.plain_latency.of(1) if is_known else milliseconds
        return max(0.0, min(milliseconds, most))

    def _judge_speed(self, observation: RoundObservation, idle_ms: float, usual_ms: float) -> None:
        """Feed the switch with the gain of a round, if it is informative."""
        switch = self.switch(observation.mode)
        # Lookups exist with and without a drafter.
        if switch is None or observation.by_hand or observation.origin == "lookup":
            return
        # A stall is not representative: a kernel is compiled, or other programs used the core.
        if self.streams == 1:
            usual_idle_ms = max(usual_ms, self.idle_ms[observation.origin].value)
            time_ms = min(idle_ms, STALL * usual_idle_ms)
            time_ms += min(observation.verify_ms, STALL * usual_ms)
        else:
            since_ms = observation.since_last_ms or idle_ms + observation.verify_ms
            time_ms = min(since_ms, STALL * self.streams * usual_ms)
        switch.observe(
            observation.accepted + 1,
            time_ms,
            self._least_loss_ms(observation.mode),
            speculating=observation.speculating,
            plain_ms=self._plain_round_ms,
            now=observation.ended_at,
        )

    @property
    def _plain_round_ms(self) -> float:
        """Time of a round of a free run at the present pace; infinite if none was seen."""
        idle = self.run_idle_ms
        return self.plain_latency.of(self.streams) + idle.value if idle.is_known else inf

    def _least_loss_ms(self, mode: Mode) -> float:
        """Return the extra time of a round with one wrong draft token, or with none."""
        in_turn = mode == "sd" or self.drafts_in_turn
        latency = self.plain_latency if in_turn else self.verify_latency
        round_ms = latency.of(self.streams + 1) + (self.draft_token_ms if in_turn else 0.0)
        return max(self.run_start_ms.value, round_ms - self.plain_latency.of(self.streams))

    def _compare_ways(self) -> None:
        """Choose between drafting during verifications and in turn with them."""
        if self.verify_latency.is_observed and self.plain_latency.is_known and self.draft_token_ms:
            prefer = _CLEARLY if self.drafts_in_turn else 1.0 / _CLEARLY
            planned = self._plan_schedule(
                self.backup_rate, self.hits.value, prefer=prefer, **self._besides
            )
            if planned.way != "plain":
                self.drafts_in_turn = planned.way == "in turn"

    def _plan_schedule(self, acceptance: float, hits: float, **more: float) -> Schedule:
        alone, contended = self.plain_latency.of, self.verify_latency.of
        return plan_schedule(alone, contended, self.draft_token_ms, acceptance, hits=hits, **more)
