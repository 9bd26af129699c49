"""What a drafter is told when nobody waits for its draft any more."""

import pytest

from orchestrator.learning.cost_model import CostModel
from orchestrator.sequence.drafter_sync import DrafterSync
from orchestrator.sequence.limits import Limits, RoundLimits
from orchestrator.sequence.planner import Planner
from protocol.messages import DraftNow
from tests.support.fakes import Stack, Target

TOKENS = [5, 6, 7, 8]
PLANNER = Planner("sd", CostModel())


def sync() -> DrafterSync:
    found = DrafterSync(1, PLANNER)
    found.on_open(TOKENS)
    return found


def ask(one: DrafterSync) -> None:
    one.draft_now(TOKENS, 1, 0, 4, RoundLimits(Limits(9, frozenset(), 0), PLANNER, 1))


def test_a_draft_that_is_used_before_its_end_is_stopped_once() -> None:
    """The drafter would go on with it beside the verification."""
    one = sync()
    assert one.stop(TOKENS, 2) == []
    ask(one)
    [stop] = one.stop(TOKENS, 2)
    assert (stop.count, stop.round, stop.base, stop.tokens) == (0, 2, 3, [])
    assert one.stop(TOKENS, 2) == []


def test_a_draft_that_is_complete_needs_no_stop() -> None:
    """Nor one of a drafter that has been opened anew."""
    one = sync()
    ask(one)
    one.on_last_depth()
    assert one.stop(TOKENS, 2) == []
    ask(one)
    one.on_open(TOKENS)
    assert one.stop(TOKENS, 2) == []


@pytest.mark.parametrize("trees", [False, True])
def test_nothing_is_drafted_for_nobody(trees: bool) -> None:  # noqa: FBT001  # pytest names it
    """Between two rounds of `sd` the drafter rests, however short the draft was cut."""
    limits = Limits(40, frozenset(), 0)
    stack = Stack(mode="sd", target=Target(0), prompt=[1], limits=limits, skill=0.6, trees=trees)
    stack.drafter_comes()
    stack.calm().assert_plain()
    drafts = [one for one in stack.to_drafter() if isinstance(one, DraftNow)]
    assert any(one.count for one in drafts)
    assert any(not one.count for one in drafts)
    assert stack.sequence.recorder.stale_trees == 0
