"""How long the target waits for a draft."""

from collections.abc import Callable

import pytest

from orchestrator.learning.cost_model import CostModel
from orchestrator.requests.request import Request
from orchestrator.requests.timeouts import Timeouts
from orchestrator.sequence.limits import Limits
from orchestrator.sequence.phase import Phase
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.sequence import Sequence
from orchestrator.telemetry.recorder import Recorder
from protocol.messages import DraftTree, Prefilled, Sampling
from tests.orchestrator.test_registry import DRAFTER
from tests.orchestrator.text.test_stop_strings import stoppable


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def timeouts(usual_ms: float, clock: Callable[[], float] = lambda: 10.0) -> Timeouts:
    estimates = CostModel()
    estimates.backup_ms.value = usual_ms
    return Timeouts(estimates, draft_timeout_s=5.0, verify_timeout_s=600.0, clock=clock)


def drafting() -> Request:
    """A request whose target waits for a draft."""
    sequence = Sequence(
        number=1,
        prompt=[1, 2],
        sampling=Sampling(),
        limits=Limits(9, frozenset(), 0),
        planner=Planner("sd", CostModel(), 3),
        recorder=Recorder(0.0),
    )
    sequence.phase = Phase.DRAFTING
    return Request(b"c", 1, sequence, stoppable([], []), 2)


def test_a_draft_is_waited_for_as_long_as_drafts_take() -> None:
    """Ten times the usual, at least a quarter of a second, never more than the limit."""
    waits = [timeouts(usual).draft_wait_s for usual in (0.0, 2.0, 20.0, 100.0, 900.0)]
    assert waits == [0.25, 0.25, 0.25, 1.0, 5.0]


def test_a_late_drafter_is_hardly_waited_for() -> None:
    """After one draft did not come, the next miss costs 20 ms, until the drafter sends again."""
    clock = Clock()
    some, request = timeouts(100.0, clock), drafting()
    some.start(request, 3.0)
    assert request.deadline == 11.0
    clock.now = 10.9
    assert some.find_late([request]) == []
    assert some.seconds_left([request], 5.0) == pytest.approx(0.1)
    clock.now = 11.0
    assert some.find_late([request]) == [request]
    assert some.seconds_left([request], 5.0) == 0.0
    some.give_up(request)
    assert request.sequence.phase is Phase.VERIFYING
    assert some.draft_wait_s == 0.02
    some.on_draft(None, 12.0)
    assert some.draft_wait_s == 1.0


def test_each_depth_starts_the_wait_anew() -> None:
    """A draft that keeps arriving is not late, however long all of it takes."""
    clock = Clock()
    some, request = timeouts(100.0, clock), drafting()
    some.start(request, 10.0)
    clock.now = 10.8
    some.on_draft(request, 10.8)
    assert request.deadline == 11.8


def test_a_verification_that_does_not_end_ends_the_request() -> None:
    """With the name of the setting in the error."""
    clock = Clock()
    some, request = timeouts(100.0, clock), drafting()
    request.sequence.phase = Phase.VERIFYING
    some.start(request, 10.0)
    assert request.deadline == 610.0
    clock.now = 610.0
    assert some.find_late([request]) == [request]
    actions = some.give_up(request)
    assert request.sequence.phase is Phase.FINISHED
    assert "verify_timeout_s" in str(actions[-1])


def test_nobody_waits_for_a_drafter_that_has_not_computed_the_prompt() -> None:
    """From its Hello until it says that it has, or sends a tree all the same."""
    request, prefilled = drafting(), Prefilled(sequence=1, length=2, prefill_ms=1.0)
    request.on_service_up(DRAFTER)
    request.on_prefilled(prefilled, "verifier", 1.0)
    assert request.sequence._drafter_sync.is_filling
    request.on_prefilled(prefilled, "drafter", 1.0)
    assert not request.sequence._drafter_sync.is_filling
    request.on_service_up(DRAFTER)
    assert request.sequence._drafter_sync.is_filling
    tree = DraftTree(sequence=1, round=9, depth=1, tokens=[], confidences=[], draft_ms=1.0)
    request.on_tree(tree, 1.0)
    assert not request.sequence._drafter_sync.is_filling
