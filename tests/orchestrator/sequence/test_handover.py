"""Prepared rounds that the verifier begins by itself: which, when, and that they change nothing."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.handover import HandoverEstimates
from orchestrator.learning.round_observation import RoundObservation
from orchestrator.sequence.actions import Finish, HandOver, ToVerifier
from orchestrator.sequence.handover import MOST_NODES
from orchestrator.sequence.phase import Phase
from protocol.messages import Origin, Verify
from tests.orchestrator.sequence.test_sequence import ENDLESS, PLANS, SALTS
from tests.support.fakes import Stack, Target, observed, started

AHEAD: dict[str, Any] = {
    "mode": "ssd",
    "prompt": [1, 2],
    "limits": ENDLESS,
    "num_draft_tokens": 3,
    "verify_ahead": True,
}


def handed(stack: Stack) -> list[HandOver]:
    return [action for action in stack.actions if isinstance(action, HandOver)]


@pytest.mark.parametrize("salt", SALTS)
def test_every_hit_goes_on_unasked_where_drafts_come_in_time(salt: int) -> None:
    """After the first round nobody is asked, and the answer is that of plain decoding."""
    stack = started(target=Target(salt), **AHEAD).calm()
    stack.assert_plain()
    recorder = stack.sequence.recorder
    assert recorder.ahead_rounds == recorder.hits == recorder.rounds - 1
    asked = [action for action in stack.actions if isinstance(action, ToVerifier)]
    assert sum(isinstance(action.message, Verify) for action in asked) == 1


@settings(max_examples=150)
@given(
    PLANS.map(lambda plan: plan | {"mode": "ssd", "verify_ahead": True}),
    st.integers(0, 255),
    st.integers(0, 150),
    st.sampled_from([0.5, 0.9, 1.0]),
)
def test_the_answer_is_that_of_plain_decoding(
    plan: dict[str, Any], salt: int, chaos: int, patience: float
) -> None:
    """Whoever dies, and whatever comes too late."""
    stack = Stack(target=Target(salt), **plan)
    stack.chaos(chaos)
    stack.calm(patience).assert_plain()
    assert stack.sequence.recorder.ahead_rounds <= stack.sequence.recorder.hits


@pytest.mark.parametrize("salt", SALTS)
def test_nothing_is_handed_over_where_it_is_forbidden(salt: int) -> None:
    """By the request, by the rejection rule's drafts, in modes without a speculation cache."""
    for change in ({"verify_ahead": False}, {"mode": "sd"}, {"mode": "ar", "num_draft_tokens": 0}):
        stack = started(target=Target(salt), **AHEAD | change).calm()
        stack.assert_plain()
        assert handed(stack) == []
    stack = started(target=Target(salt), **AHEAD)
    object.__setattr__(stack.sequence.planner, "sampled", True)
    stack.calm().assert_plain()
    assert handed(stack) == []


def test_the_answer_never_goes_on_behind_its_end() -> None:
    """No round is handed over for an outcome that ends the answer."""
    for salt in SALTS:
        stack = started(target=Target(salt), **AHEAD)
        while stack.sequence.phase is not Phase.FINISHED:
            while stack.drafter_works():
                stack.tree_arrives()
            for _, bonus in stack.sequence.current.on_offer:
                assert bonus not in stack.limits.stop_ids
            stack.outcome_arrives()
        assert stack.verifier is not None
        assert stack.verifier.kv is None


def test_what_was_handed_over_is_bounded() -> None:
    """However many outcomes are prepared, and however deep."""
    stack = started(target=Target(SALTS[0]), **AHEAD | {"budget": 200, "num_draft_tokens": 60})
    while stack.drafter_works():
        stack.tree_arrives()
    current = stack.sequence.current
    assert MOST_NODES - 61 <= current.handed_nodes <= MOST_NODES
    assert sum(len(one.verify.nodes) for one in current.handed) == current.handed_nodes
    stack.calm().assert_plain()


def test_what_is_forbidden_meanwhile_is_taken_back() -> None:
    """The planner has changed its mind: plain decoding is to be measured."""
    stack = started(target=Target(SALTS[0]), **AHEAD)
    for _ in range(3):
        stack.calm_round()
    while stack.drafter_works():
        stack.tree_arrives()
    current = stack.sequence.current
    assert current.on_offer
    offered = set(current.on_offer)
    object.__setattr__(stack.sequence.planner, "verify_ahead", False)
    stack.do(stack.sequence._next_rounds.handover.update(current, stack.sequence.round))
    assert handed(stack)[-1] == HandOver(stack.sequence.round, dict.fromkeys(offered, 0))
    before = stack.sequence.recorder.ahead_rounds
    assert stack.outcome_arrives()
    assert stack.sequence.recorder.ahead_rounds == before
    stack.calm().assert_plain()


@pytest.mark.parametrize("number", [1, 2, 10**6])
def test_a_verifier_that_began_something_else_ends_the_request(number: int) -> None:
    """Not handed over at all, or for another outcome."""
    stack = started(target=Target(SALTS[0]), **AHEAD)
    stack.calm_round()
    while stack.drafter_works():
        stack.tree_arrives()
    assert stack.verifier is not None
    right = stack.verifier.take()
    assert right is not None
    assert right.began
    handed_for = [
        index
        for index, one in enumerate(stack.sequence.current.handed, 1)
        if one.verify.nodes[0] == right.bonus
    ]
    wrong = next(n for n in range(number, number + 10**6) if n not in handed_for)
    stack.do(stack.sequence.decide(replace(right, began=wrong), stack.now))
    assert stack.finishes == [Finish("error", "the verifier began what it was not handed")]


@pytest.mark.parametrize("restart", ["verifier_dies", "drafter_dies", "drafter_comes"])
def test_whoever_dies_beside_a_round_that_began_unasked_changes_nothing(restart: str) -> None:
    """Before the orchestrator knows that it has begun, and after that."""
    for salt in SALTS:
        for rounds in range(1, 7):
            stack = started(target=Target(salt), **AHEAD)
            for _ in range(rounds):
                stack.calm_round()
            while stack.drafter_works():
                stack.tree_arrives()
            getattr(stack, restart)()
            stack.calm().assert_plain()


# ---------------------------------------------------------------- whether it pays


def seen(idle_ms: float, origin: Origin = "hit", *, unasked: bool = False) -> RoundObservation:
    return observed(origin=origin, idle_ms=idle_ms, begun_unasked=unasked)


def play(estimates: HandoverEstimates, rounds: int, saved_ms: float) -> int:
    """How many of so many rounds begin unasked, where that saves so much."""
    begun = 0
    for _ in range(rounds):
        pays = estimates.pays
        begun += pays
        estimates.observe(seen(1.0 - saved_ms * pays, unasked=pays))
    return begun


def test_it_is_measured_and_then_used_where_the_host_takes_time() -> None:
    """A tenth of a round is saved: nearly all rounds begin unasked."""
    estimates = HandoverEstimates()
    assert play(estimates, 200, 0.9) > 190
    assert estimates.gain == pytest.approx(0.09, rel=0.1)


def test_it_is_left_where_next_to_nothing_is_saved() -> None:
    """Less than a fiftieth of a round: hardly any do; and it is seen when that changes."""
    estimates = HandoverEstimates()
    assert play(estimates, 400, 0.1) < 15
    assert play(estimates, 5000, 0.9) > 4000


def test_rounds_that_miss_count_against_it() -> None:
    """One hit in thirty, of which a tenth is saved."""
    estimates = CostModel().handover
    for _ in range(400):
        for _ in range(29):
            estimates.observe(seen(1.0, "miss"))
        estimates.observe(seen(0.1 if estimates.pays else 1.0, unasked=estimates.pays))
    assert estimates.gain < 0.01


def test_it_is_left_where_drafts_would_be_shorter_for_it() -> None:
    """A tenth of a round is saved, and nearly as much of what drafts bring is lost."""
    estimates = HandoverEstimates()
    estimates.lost_share = 0.09
    assert play(estimates, 400, 0.9) < 15
