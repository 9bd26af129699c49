"""Deadlines of the waits for services, and their consequences. Times in seconds.

A verification that misses its deadline ends the request. A draft that misses it only ends the wait:
that wait lasts while a draft is likely to arrive and not much longer, and starts again with each
depth that arrives. A drafter that has failed to deliver gets a very short wait until it sends
something again.
"""

from collections.abc import Callable, Iterable

from orchestrator.learning.cost_model import CostModel
from orchestrator.requests.request import Request
from orchestrator.sequence.actions import Action
from orchestrator.sequence.phase import Phase
from protocol.process.awake_clock import awake_time

_DRAFT_WAIT_S = 0.25
"""Wait for a draft that is usually faster, or was never timed."""
_USUAL_TIMES = 10.0
"""Wait for any other draft, as a multiple of the usual time per depth."""
_LATE_WAIT_S = 0.02
"""Wait for a drafter that did not deliver the last time."""


class Timeouts:
    """Sets and checks the deadlines of all requests.

    Args:
        estimates: how long drafts and passes take.
        draft_timeout_s: longest wait for a draft.
        verify_timeout_s: longest wait for a verification.
        clock: of the deadlines; while this process sleeps, none of them comes nearer.
    """

    def __init__(
        self,
        estimates: CostModel,
        draft_timeout_s: float,
        verify_timeout_s: float,
        clock: Callable[[], float] = awake_time,
    ) -> None:
        self._clock = clock
        self._estimates = estimates
        self._draft_timeout_s = draft_timeout_s
        self._verify_timeout_s = verify_timeout_s

    @property
    def draft_wait_s(self) -> float:
        """Longest wait for the next depth of a draft, from the usual time of one."""
        if self._estimates.drafter_is_late:
            return min(self._draft_timeout_s, _LATE_WAIT_S)
        usual_s = self._estimates.draft_token_ms / 1e3
        return min(self._draft_timeout_s, max(_DRAFT_WAIT_S, _USUAL_TIMES * usual_s))

    def start(self, request: Request, now: float) -> None:
        """Set the deadline of the service that the request waits for since `now` (monotonic)."""
        match request.sequence.phase:
            case Phase.VERIFYING:
                request.deadline = self._clock() + self._verify_timeout_s
                if request.sequence.recorder.verifying_since is None:
                    request.sequence.recorder.verifying_since = now
            case Phase.DRAFTING:
                request.deadline = self._clock() + self.draft_wait_s
            case Phase.STRANDED | Phase.HELD | Phase.FINISHED:
                request.deadline = None

    def on_draft(self, request: Request | None, now: float) -> None:
        """Extend the deadline after the drafter has delivered a depth."""
        self._estimates.drafter_is_late = False
        if request is not None and request.sequence.phase is Phase.DRAFTING:
            self.start(request, now)

    def find_late(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that have waited for too long."""
        now = self._clock()
        return [r for r in requests if r.deadline is not None and now >= r.deadline]

    def seconds_left(self, requests: Iterable[Request], at_most: float) -> float:
        """Return the time until the first of these deadlines, between 0 and `at_most`."""
        deadlines = [request.deadline for request in requests if request.deadline is not None]
        now = self._clock()
        return max(0.0, min([at_most, *(deadline - now for deadline in deadlines)]))

    def give_up(self, request: Request) -> list[Action]:
        """End the wait of a request, or the request."""
        if request.sequence.phase is Phase.DRAFTING:
            self._estimates.drafter_is_late = True
            return request.sequence.on_draft_late()
        limit = self._verify_timeout_s
        reason = f"the verifier did not answer within {limit:g} s (verify_timeout_s)"
        return request.sequence.finish("error", reason)
