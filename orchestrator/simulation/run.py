"""One simulated answer: the product's sequence, plan and statistics between modelled services."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from orchestrator.learning.cost_model import CostModel
from orchestrator.sequence.actions import (
    Action,
    Emit,
    Finish,
    ToDrafter,
    ToVerifier,
)
from orchestrator.sequence.limits import Limits
from orchestrator.sequence.phase import Phase
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.sequence import Sequence
from orchestrator.simulation.bound import Rounds, upper_bound_tok_s
from orchestrator.simulation.event_queue import EventQueue
from orchestrator.simulation.latency_curve import curve
from orchestrator.simulation.models import DrafterModel, Noise, VerifierModel
from orchestrator.simulation.oracle import Oracle
from orchestrator.simulation.scenario import Device, Scenario, Strategy
from orchestrator.telemetry.recorder import Recorder
from protocol.errors import RuntimeFailure
from protocol.messages import (
    DraftNow,
    DraftTree,
    Extend,
    PassTimes,
    Prepare,
    Revoke,
    Sampling,
    Statistics,
    VerificationOutcome,
    Verify,
)

_LONGEST_DRAFT = 64
_MEASURED_ROWS = (1, 2, 4, 8, 16, 32)
"""Batch sizes that a verifier times at load, approximately."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a simulated answer."""

    strategy: Strategy
    tok_s: float
    bound_tok_s: float
    """Theorem 7 with the hit rate, lengths and times of these rounds (`bound`)."""
    statistics: Statistics

    @property
    def efficiency(self) -> float:
        """Tokens per second as a fraction of the bound."""
        return self.tok_s / self.bound_tok_s if self.bound_tok_s else 0.0


def simulate(scenario: Scenario, strategy: Strategy, estimates: CostModel | None = None) -> Run:
    """Decode one answer in virtual time; `estimates` are those learned before, if any."""
    return _Answer(scenario, strategy, estimates or load(scenario.device)).decode()


def load(device: Device) -> CostModel:
    """Return the estimates that follow from what services on such a device report at load."""
    estimates = CostModel()
    estimates.expect_passes(_time_passes(device))
    estimates.expect_passes(PassTimes(chains={1: curve(device.t_draft).of(1)}), "drafter")
    estimates.branches, estimates.drafts_in_turn = device.branches, device.shares_cores
    return estimates


def _time_passes(device: Device) -> PassTimes:
    cost = curve(device.t_verify)
    times = {rows: cost.of(rows) + device.exchange_ms(rows) for rows in _MEASURED_ROWS}
    slower = 1.0 + device.contention
    contended = {rows: slower * ms for rows, ms in times.items() if device.shares_cores}
    return PassTimes(chains=times, contended=contended)


@dataclass
class _Books:
    hit: Rounds = field(default_factory=Rounds)
    other: Rounds = field(default_factory=Rounds)


class _Answer:
    """The edge around a sequence, like `Executor`, with an event queue in place of sockets."""

    def __init__(self, scenario: Scenario, strategy: Strategy, estimates: CostModel) -> None:
        self._strategy, self._estimates = strategy, estimates
        self._ipc = scenario.device.ipc
        self._events = events = EventQueue()
        oracle = Oracle(scenario.acceptance, scenario.tokens, scenario.seed)
        noise = Noise(scenario.device.jitter, scenario.seed)
        device = scenario.device
        self._drafter = DrafterModel(events, device, oracle, noise, send=self._send_tree)
        self._verifier = VerifierModel(
            events, device, oracle, noise, drafter=self._drafter, send=self._send_outcome
        )
        self._recorder = Recorder(0.0)
        estimates.on_new_text(strategy.mode)
        self._sequence = Sequence(
            number=1,
            prompt=[oracle.token(0)],
            sampling=Sampling(),
            limits=Limits(scenario.tokens, frozenset(), 0),
            planner=Planner(
                strategy.mode,
                estimates,
                strategy.num_draft_tokens,
                strategy.branches,
                tree_nodes=strategy.tree_nodes,
            ),
            recorder=self._recorder,
        )
        self._books = _Books()

    def decode(self) -> Run:
        self._do_all(self._sequence.on_verifier_up(_LONGEST_DRAFT, takes_trees=True))
        if self._strategy.mode != "ar":
            self._do_all(self._sequence.on_drafter_up(0, takes_trees=True))
            self._sequence.on_drafter_filled()
        while self._sequence.phase is not Phase.FINISHED:
            if not self._events.step():
                raise RuntimeFailure("the simulation cannot continue: no event is left")
        statistics = self._recorder.summarise()
        books, waits = self._books, self._recorder.phases.get("draft_wait", [])
        return Run(
            strategy=self._strategy,
            tok_s=statistics.tok_s,
            bound_tok_s=upper_bound_tok_s(books.hit, books.other, sum(waits)),
            statistics=statistics,
        )

    # ------------------------------------------------------------ what services say

    def _send_outcome(self, outcome: VerificationOutcome) -> None:
        self._events.after(self._ipc, partial(self._on_outcome, outcome))

    def _on_outcome(self, outcome: VerificationOutcome) -> None:
        if self._recorder.rounds:  # the first token does not count for tok/s
            hit = self._sequence.current.origin == "hit"
            rounds = self._books.hit if hit else self._books.other
            rounds.add(outcome.accepted + 1, outcome.verify_ms)
        self._recorder.verifying_since = self._now_s if outcome.goes_on else None
        self._do_all(self._sequence.decide(outcome, self._now_s))
        self._do_all(self._sequence.record(self._now_s))

    def _send_tree(self, tree: DraftTree) -> None:
        self._events.after(self._ipc, partial(self._on_tree, tree))

    def _on_tree(self, tree: DraftTree) -> None:
        self._recorder.add_tree(tree, self._now_s)
        self._do_all(self._sequence.on_tree(tree, self._now_s))

    # ------------------------------------------------------------ what the sequence wants

    @property
    def _now_s(self) -> float:
        return self._events.now / 1e3

    def _do_all(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case ToVerifier(Verify() | Extend() | Revoke() as message):
                    if isinstance(message, Verify):
                        self._recorder.verifying_since = self._now_s
                    self._events.after(self._ipc, partial(self._verifier.receive, message))
                case ToDrafter(Prepare() | DraftNow() as message):
                    self._events.after(self._ipc, partial(self._drafter.receive, message))
                case Finish(reason, error) if reason != "length":
                    raise RuntimeFailure(f"the simulated answer ended by {reason}: {error}")
                case ToVerifier() | ToDrafter() | Emit() | Finish():
                    pass  # opening and closing take no time here
