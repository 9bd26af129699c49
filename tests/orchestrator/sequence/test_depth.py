"""How deep branches are prepared: what was worth verifying of late decides."""

from orchestrator.learning.cost_model import CostModel
from orchestrator.sequence.planner import Planner
from tests.support.fakes import chain_of, observed


def verified(estimates: CostModel, count: int) -> None:
    """A round that verified a draft of `count` tokens."""
    estimates.observe_round(observed(confidences=[0.9] * count))


def test_branches_go_deeper_than_what_was_worth_verifying() -> None:
    """Long drafts make deep trees, up to a limit; short ones shallow trees, but not at once."""
    estimates = CostModel()
    plan = Planner("ssd", estimates)
    depths = [plan.depth]
    for count, rounds in ((4, 1), (6, 1), (1, 1), (64, 1), (1, 2000)):
        for _ in range(rounds):
            verified(estimates, count)
        depths.append(plan.depth)
    assert depths == [4, 6, 8, 8, 16, 3]


def test_a_lookahead_fixed_by_hand_is_the_depth() -> None:
    """Whatever was verified."""
    estimates = CostModel()
    verified(estimates, 9)
    assert Planner("ssd", estimates, num_draft_tokens=5).depth == 5


def test_a_preset_may_cap_the_depth() -> None:
    """No deeper than asked for, and no longer draft is verified; a fixed length is not capped."""
    estimates = CostModel()
    for _ in range(50):
        verified(estimates, 9)
    capped = Planner("ssd", estimates, max_draft_tokens=3)
    assert Planner("ssd", estimates).depth > capped.depth == 3
    fresh, sure = CostModel(), [0.999] * 8
    assert len(Planner("ssd", fresh).choose_nodes(chain_of(sure), "hit")) > 3
    assert len(Planner("ssd", fresh, max_draft_tokens=3).choose_nodes(chain_of(sure), "hit")) == 3
    assert Planner("ssd", estimates, num_draft_tokens=5, max_draft_tokens=3).depth == 5
