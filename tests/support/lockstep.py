"""A target and a drafter in this process, one after the other: every tree comes in time.

Which outcomes are hit then depends on the two models alone, not on which process is faster.
"""

from collections import deque
from collections.abc import Iterable

import msgspec

from orchestrator.learning.cost_model import CostModel
from orchestrator.sequence.limits import Limits
from orchestrator.sequence.phase import Phase
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.sequence import Action, Sequence, ToDrafter, ToVerifier
from orchestrator.telemetry.recorder import Recorder
from protocol.messages import (
    DraftTree,
    Prefilled,
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
from tests.support.reference import said

_VERIFY_MS, _DRAFT_MS = 50.0, 5.0
"""Told to the planner in place of what was measured, so that every run is the same."""


class Lockstep:
    """One request in mode `ssd`, with a fixed lookahead."""

    def __init__(
        self, verifier: Verifier, backend: DraftBackend, prompt: Tokens, limits: Limits,
        *, num_draft_tokens: int, sampling: Sampling,
    ) -> None:  # fmt: skip
        self._verifier, self._drafter = verifier, Drafter(backend)
        self._to_drafter: deque[Work] = deque()
        self._to_verifier: deque[Work] = deque()
        self._now = 0.0
        self.sequence = Sequence(
            number=1,
            prompt=prompt,
            sampling=sampling,
            limits=limits,
            planner=Planner("ssd", CostModel(), num_draft_tokens),
            recorder=Recorder(0.0),
        )
        self._do(self.sequence.on_drafter_up(0))
        self._do(self.sequence.on_verifier_up(64))

    def run(self) -> Statistics:
        """To the end of the answer: the drafter does all it can, then the target verifies."""
        while self.sequence.phase is not Phase.FINISHED:
            while self._to_drafter:
                self._draft(self._to_drafter.popleft())
            self._verify(self._to_verifier.popleft())
        return self.sequence.recorder.summarise()

    def _draft(self, message: Work) -> None:
        for answer in said(self._drafter.handle(message)):
            if isinstance(answer, DraftTree):
                tree = msgspec.structs.replace(answer, draft_ms=_DRAFT_MS)
                self._do(self.sequence.on_tree(tree, self._now))
            else:
                assert isinstance(answer, Prefilled)

    def _verify(self, message: Work) -> None:
        answers = said(self._verifier.handle(message))
        if not isinstance(message, Verify):
            return
        [answer] = answers
        assert isinstance(answer, VerificationOutcome)
        self._now += _VERIFY_MS / 1e3
        outcome = msgspec.structs.replace(answer, verify_ms=_VERIFY_MS, idle_ms=0.0)
        self._do(self.sequence.decide(outcome, self._now))
        self._do(self.sequence.record(self._now))

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, ToVerifier):
                self._to_verifier.append(action.message)
            elif isinstance(action, ToDrafter):
                self._to_drafter.append(action.message)
