"""Until when each request waits for what it waits for, and what happens then."""

from collections.abc import Iterable, Iterator

from orchestrator.learning.cost_model import CostModel
from orchestrator.requests.patience import DraftTimeout
from orchestrator.requests.request import Request
from orchestrator.sequence.actions import Action
from orchestrator.sequence.phase import Phase
from protocol.settings import OrchestratorSettings


class Timeouts:
    """Sets and checks the deadlines of all answers."""

    def __init__(self, settings: OrchestratorSettings, estimates: CostModel) -> None:
        self._settings = settings
        self._estimates = estimates
        self._patience = DraftTimeout(settings.draft_timeout_s)

    def expect(self, answer: Request, now: float) -> None:
        """Set the deadline of whatever the answer now waits for."""
        wait_s = self._patience.wait_s(self._estimates.draft_token_ms)
        answer.expect(self._settings.verify_timeout_s, wait_s, now)

    def draft_came(self, answer: Request | None, now: float) -> None:
        """The drafter delivered a depth; the next one may take as long again."""
        self._patience.came()
        if answer is not None and answer.sequence.phase is Phase.DRAFTING:
            self.expect(answer, now)

    def passed(
        self, answers: Iterable[Request], now: float
    ) -> Iterator[tuple[Request, Iterable[Action]]]:
        """The answers that have waited for too long, and what to do."""
        for answer in list(answers):
            if answer.deadline is None or now < answer.deadline:
                continue
            if answer.sequence.phase is Phase.DRAFTING:
                self._patience.late()
                yield answer, answer.sequence.draft_is_late()
            else:
                limit = self._settings.verify_timeout_s
                reason = f"the verifier did not answer within {limit:g} s (verify_timeout_s)"
                yield answer, answer.sequence.finish("error", reason)
