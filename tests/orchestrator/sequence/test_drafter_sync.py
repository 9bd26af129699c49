"""What a drafter is told when nobody waits for its draft any more."""

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.round_observation import RoundObservation
from orchestrator.sequence.actions import Action, ToVerifier
from orchestrator.sequence.draft import Draft
from orchestrator.sequence.drafter_sync import DrafterSync
from orchestrator.sequence.limits import Limits
from orchestrator.sequence.lookup import PromptLookup
from orchestrator.sequence.planner import Planner, Preparation
from protocol.messages import DraftNow, DraftTree, Prepare, Verify
from tests.support.fakes import Stack, Target, judged

TOKENS = [5, 6, 7, 8]


def sync() -> DrafterSync:
    drafter = DrafterSync(1)
    drafter.on_open(TOKENS)
    return drafter


def ask(drafter: DrafterSync) -> None:
    drafter.draft_now(TOKENS, 1, 0, Preparation([], 4, 1))


def test_a_draft_that_is_used_before_its_end_is_stopped_once() -> None:
    """The drafter would go on with it beside the verification."""
    drafter = sync()
    assert drafter.stop(TOKENS, 2) == []
    ask(drafter)
    [stop] = drafter.stop(TOKENS, 2)
    assert (stop.count, stop.round, stop.base, stop.tokens) == (0, 2, 3, [])
    assert drafter.stop(TOKENS, 2) == []


def test_a_draft_that_is_complete_needs_no_stop() -> None:
    """Nor one of a drafter that has been opened anew."""
    drafter = sync()
    ask(drafter)
    drafter.on_last_depth()
    assert drafter.stop(TOKENS, 2) == []
    ask(drafter)
    drafter.on_open(TOKENS)
    assert drafter.stop(TOKENS, 2) == []


@pytest.mark.parametrize("trees", [False, True])
def test_nothing_is_drafted_for_nobody(trees: bool) -> None:  # noqa: FBT001  # pytest names it
    """Between two rounds of `sd` the drafter rests, however short the draft was cut."""
    limits = Limits(40, frozenset(), 0)
    stack = Stack(mode="sd", target=Target(0), prompt=[1], limits=limits, skill=0.6, trees=trees)
    stack.drafter_comes()
    stack.calm().assert_plain()
    drafts = [message for message in stack.to_drafter() if isinstance(message, DraftNow)]
    assert any(draft.count for draft in drafts)
    assert any(not draft.count for draft in drafts)
    assert stack.sequence.recorder.stale_trees == 0


@pytest.mark.parametrize(("step_ms", "depth"), [(1.0, 6), (5.0, 4), (8.0, 2), (50.0, 1)])
def test_no_depth_is_asked_for_that_comes_too_late(step_ms: float, depth: int) -> None:
    """Beside a verification of 22 ms; the first depth takes in the chain, 2 ms here."""
    estimates = CostModel()
    estimates.draft_length = 4.0
    estimates.verify_latency.expect({1: 22.0, 3: 22.0})
    estimates.observe_step(2, step_ms)
    estimates.observe_step(1, step_ms + 2.0)
    planner = Planner("ssd", estimates, fixed_branches=8)
    preparation = planner.plan_preparation(Draft([1, 2], [0.5, 0.5]), "hit")
    assert preparation.depth == depth


def test_after_a_pause_the_drafter_catches_up_beside_a_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked for a draft, and waited for, when it has taken in what it missed.

    The verification beside it is none of the trial's.
    """
    monkeypatch.setattr(PromptLookup, "find", lambda *_: Draft())  # it would be verified there
    estimates = judged()
    switch = estimates.switch("ssd")
    assert switch is not None
    while switch.speculating:
        switch.observe(1, 2e3, 100.0, speculating=True)
    limits = Limits(200, frozenset(), 0)
    stack = Stack(mode="ssd", target=Target(0), prompt=[1], limits=limits, estimates=estimates)
    observations: list[RoundObservation] = []
    monkeypatch.setattr(
        estimates, "observe_round", observing(observations, estimates.observe_round)
    )
    stack.drafter_comes()
    stack.calm().assert_plain()
    requests = [
        message for message in stack.to_drafter() if isinstance(message, DraftNow | Prepare)
    ]
    first, second = requests[:2]
    assert isinstance(first, DraftNow)
    assert first.count == 0
    assert len(first.tokens) > 40
    sent = [action.message for action in stack.actions if isinstance(action, ToVerifier)]
    [beside] = [
        message for message in sent if isinstance(message, Verify) and message.round == first.round
    ]
    assert (len(beside.nodes), beside.granted, beside.drafter_idle) == (1, 0, False)
    assert second.round == first.round + 1
    assert len(second.tokens) == 1
    assert not observations[first.round - 1].speculating
    assert observations[first.round].speculating


def observing(
    observations: list[RoundObservation], observe: Callable[[RoundObservation], None]
) -> Callable[[RoundObservation], None]:
    def see(observation: RoundObservation) -> None:
        observations.append(observation)
        observe(observation)

    return see


def test_a_long_draft_that_stands_leaves_nobody_behind() -> None:
    """The drafter computed it when it prepared what may follow."""
    tokens = list(range(1, 30))
    drafter = sync()
    assert not drafter.is_behind(TOKENS)
    draft = Draft(tokens, [0.5] * len(tokens))
    drafter.prepare(TOKENS, 2, draft, Preparation([1] * 30, 2, 1))
    assert not drafter.is_behind([*TOKENS, *tokens, 3])
    assert drafter.is_behind([*TOKENS, *tokens, *range(20)])
    assert not drafter.is_behind([*TOKENS, *tokens, *range(60)], in_turn=True)
    assert drafter.is_behind([*TOKENS, *tokens, *range(70)], in_turn=True)


@pytest.mark.parametrize(("missed", "far"), [(8, False), (9, True)])
def test_a_wait_tells_nothing_while_a_drafter_reads(missed: int, *, far: bool) -> None:
    """Of the cost of a draft, unless few tokens are missing."""
    drafter = sync()
    drafter.draft_now([*TOKENS, *range(missed)], 1, 0, Preparation([], 4, 1))
    assert drafter.had_far_to_go == far


@pytest.mark.parametrize("far", [False, True])
def test_waits_are_learned_with_the_time_of_their_first_token(
    monkeypatch: pytest.MonkeyPatch, *, far: bool
) -> None:
    """Unless the drafter had many tokens to process before."""
    waits: list[tuple[float, ...]] = []
    estimates, limits = judged(), Limits(40, frozenset(), 0)
    monkeypatch.setattr(estimates, "observe_wait", lambda *wait: waits.append(wait))
    monkeypatch.setattr(DrafterSync, "had_far_to_go", far)
    plan: Any = {"mode": "sd", "target": Target(0), "prompt": [1], "limits": limits}
    stack = Stack(estimates=estimates, num_draft_tokens=3, **plan)
    sequence, on_tree = stack.sequence, stack.sequence.on_tree

    def arrive(tree: DraftTree, _: float) -> list[Action]:
        """18 ms after the request, a further token each 10 ms."""
        return on_tree(tree, sequence._waiting_since + 0.008 + 0.01 * tree.depth)

    monkeypatch.setattr(sequence, "on_tree", arrive)
    stack.drafter_comes()
    stack.calm().assert_plain()
    assert bool(waits) != far
    for depth, first_ms, waited_ms in waits:
        assert first_ms == pytest.approx(18.0)
        assert waited_ms == pytest.approx(8.0 + 10.0 * depth)
