"""A target and a drafter in this process, one after the other: every tree comes in time.

Which outcomes are hit then depends on the two models alone, not on which process is faster.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing

import msgspec

from orchestrator.sequence.actions import Action, ToDrafter, ToVerifier
from orchestrator.sequence.limits import Limits
from orchestrator.sequence.phase import Phase
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.sequence import Sequence
from orchestrator.telemetry.recorder import Recorder
from protocol.messages import (
    CloseSequence,
    DraftTree,
    Features,
    Prefilled,
    ReadTarget,
    Sampling,
    Statistics,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.drafter.backends.base import DraftBackend
from services.drafter.drafter import Drafter
from services.runtime.inbox import Work
from services.verifier.verifier import Verifier
from tests.support.fakes import judged
from tests.support.reference import said

_VERIFY_MS, _DRAFT_MS = 50.0, 5.0
"""Told to the planner in place of what was measured, so that every run is the same."""


class Lockstep:
    """One request in mode `ssd`, with a fixed lookahead.

    Args:
        verifier: may have served others.
        backend: what drafts.
        prompt: tokens.
        limits: of the answer.
        num_draft_tokens: the lookahead.
        sampling: of both models.
        tree_nodes: see `Planner`.
        deliver: what reaches the drafter, in what order, when the verifier sends its states.
    """

    def __init__(
        self, verifier: Verifier, backend: DraftBackend, prompt: Tokens, limits: Limits,
        *, num_draft_tokens: int, sampling: Sampling, tree_nodes: int = 0,
        branches: int = 0,
        deliver: Callable[[Features], list[Features]] = lambda message: [message],
    ) -> None:  # fmt: skip
        self._verifier, self._drafter = verifier, Drafter(backend)
        self._deliver, self._asked = deliver, 0
        self._to_drafter: deque[Work] = deque()
        self._to_verifier: deque[Work] = deque()
        self._now = 0.0
        self._rounds = 0
        self._before_round: Callable[[int], None] = lambda _: None
        self.sequence = Sequence(
            number=1,
            prompt=prompt,
            sampling=sampling,
            limits=limits,
            planner=Planner("ssd", judged(), num_draft_tokens, branches, tree_nodes=tree_nodes),
            recorder=Recorder(0.0),
        )
        self._verify(CloseSequence(sequence=1))  # a former request's
        self._meet(backend)
        self._do(self.sequence.on_verifier_up(64, takes_trees=verifier.takes_trees))

    def _meet(self, backend: DraftBackend) -> None:
        """The drafter is there, and the verifier is asked for what it reads."""
        identity = backend.identity
        self._do(self.sequence.on_drafter_up(0, takes_trees=identity.takes_trees))
        self.sequence.on_drafter_filled()
        self._asked += 1
        self._verify(ReadTarget(features=identity.features, number=self._asked))

    def swap(self, backend: DraftBackend) -> None:
        """Another drafter takes over; what the old one was sent does not reach it."""
        self._do(self.sequence.on_drafter_lost("drafter_swapped"))
        self._to_drafter.clear()
        self._drafter = Drafter(backend)
        self._meet(backend)

    def run(self, before_round: Callable[[int], None] = lambda _: None) -> Statistics:
        """To the end of the answer: the drafter does all it can, then the target verifies.

        Args:
            before_round: called with the number of rounds so far.
        """
        self._before_round = before_round
        while self.sequence.phase is not Phase.FINISHED:
            self._draft_all()
            self._verify(self._to_verifier.popleft())
        return self.sequence.recorder.summarise()

    def _begin_round(self) -> None:
        self._draft_all()
        self._before_round(self._rounds)
        self._draft_all()
        self._rounds += 1

    def _draft_all(self) -> None:
        while self._to_drafter:
            self._draft(self._to_drafter.popleft())

    def _draft(self, message: Work) -> None:
        for answer in said(self._drafter.handle(message)):
            if isinstance(answer, DraftTree):
                tree = msgspec.structs.replace(answer, draft_ms=_DRAFT_MS)
                self._do(self.sequence.on_tree(tree, self._now))
            else:
                assert isinstance(answer, Prefilled)

    def _verify(self, message: Work) -> None:
        """Carry out a message, and what follows it unasked."""
        if isinstance(message, Verify):
            self._begin_round()
        with closing(self._verifier.handle(message)) as answers:
            for answer in answers:
                if isinstance(answer, Features):
                    self._to_drafter += self._deliver(answer)
                elif isinstance(answer, VerificationOutcome):
                    self._end_round(answer)
                    if self.sequence.phase is Phase.FINISHED:
                        return

    def _end_round(self, answer: VerificationOutcome) -> None:
        self._now += _VERIFY_MS / 1e3
        outcome = msgspec.structs.replace(answer, verify_ms=_VERIFY_MS, idle_ms=0.0)
        self._do(self.sequence.decide(outcome, self._now))
        self._do(self.sequence.record(self._now))

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case ToVerifier(message):
                    self._to_verifier.append(message)
                case ToDrafter(message):
                    self._to_drafter.append(message)
                case _:
                    pass
