"""Whether trees pay as a whole: by turns with runners-up and without."""

from math import exp
from typing import Any

import numpy as np
import pytest

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.tree_growth import TreeTrial
from orchestrator.sequence.lookup import LookupDrafts
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.round import Round
from protocol.messages import Mode
from tests.orchestrator.sequence.test_observed import OUTCOME, limits_of
from tests.support.fakes import observed


def run(trial: TreeTrial, rounds: int, gain: float, *, seed: int = 0, text: int = 60) -> int:
    """Feed rounds of 8 ms, of which those with runners-up bring `gain` times the tokens.

    Texts of `text` rounds differ more from one another than trees do from chains.

    Returns:
        How many of the rounds asked for runners-up.
    """
    random, asked, usual = np.random.default_rng(seed), 0, 2.0
    for number in range(rounds):
        if number % text == 0:
            trial.note_round(FIRST)
            usual = float(random.uniform(1.5, 3.5))
        tokens = gain * usual if trial.asks else usual
        asked += trial.asks
        trial.observe(int(random.poisson(max(0.0, tokens - 1.0))) + 1, 8.0)
    return asked


FIRST = observed(idle_ms=None, chooses_trees=True)
"""Of a request: nothing was asked for before it."""


def test_turns_are_taken() -> None:
    """The first one is without; who came second comes first in the next pair, and goes on."""
    trial, asked = TreeTrial(), []
    for _ in range(48):
        asked.append(trial.asks)
        trial.observe(2, 8.0)
    assert asked == [False] * 10 + [True] * 18 + [False] * 18 + [True] * 2


@pytest.mark.parametrize("seed", range(4))
def test_trees_that_pay_are_found(seed: int) -> None:
    """Nearly all rounds have runners-up then, but for another trial now and then."""
    trial = TreeTrial()
    run(trial, 2000, 1.3, seed=seed)
    assert trial.pays
    assert run(trial, 2000, 1.3, seed=10 + seed) > 1700


def test_trees_that_do_not_pay_cost_little() -> None:
    """Where they are slower by a tenth few rounds are spent on finding that out."""
    trials = [TreeTrial() for _ in range(20)]
    asked = [run(trial, 1000, 0.9, seed=seed) for seed, trial in enumerate(trials)]
    assert not any(trial.pays for trial in trials)
    assert np.mean(asked) < 150


@pytest.mark.parametrize(("gain", "pairs"), [(1.5, 3), (1.03, 12), (1.01, 12), (0.9, 3)])
def test_a_trial_is_as_long_as_it_has_to_be(gain: float, pairs: int) -> None:
    """What is clear is clear after three pairs; a little must be worth it in the end."""
    trial, asked = TreeTrial(), False
    turns = 0
    while not trial.save().rest:
        turns += trial.asks and not asked
        asked = trial.asks
        trial.observe(2, 8.0 / gain if trial.asks else 8.0)
    assert trial.pays is (gain > 1.02)
    # Two turns of a kind follow one another, but for the first one and perhaps the last.
    assert turns == -(-pairs // 2)


def test_what_is_equal_is_not_tried_for_long() -> None:
    """There is an end to a trial that proves nothing."""
    asked = [run(TreeTrial(), 1000, 1.0, seed=seed) for seed in range(20)]
    assert np.mean(asked) < 400


def test_the_verdict_may_change() -> None:
    """Another text, other programs beside: what was found is tried again."""
    trial = TreeTrial()
    run(trial, 1000, 1.4)
    assert trial.pays
    run(trial, 4000, 0.7)
    assert not trial.pays


@pytest.mark.parametrize("gain", [1.3, 0.7])
def test_short_answers_are_enough(gain: float) -> None:
    """A turn goes on in the next text: a trial that waits for long ones would have no end."""
    found = []
    for seed in range(10):
        trial = TreeTrial()
        run(trial, 2000, gain, seed=seed, text=7)
        found.append(trial.pays)
    assert found.count(gain > 1.0) >= 9


@pytest.mark.parametrize(
    "other",
    [{"speculating": False}, {"sequences": 2}, {"idle_ms": None}, {"chooses_trees": False}],
    ids=str,
)
def test_rounds_behind_something_else_do_not_count(other: dict[str, Any]) -> None:
    """The first two have no draft, or one that was asked for before."""
    trial = TreeTrial()
    while not trial.save().pairs:
        trial.note_round(observed(**{"idle_ms": 1.0, "chooses_trees": True, **other}))
        for behind in range(4):
            slow = trial.asks and behind < 2
            trial.observe(1 if slow else 2, 1e3 if slow else 8.0)
    assert trial.save().log_gain == pytest.approx(0.0)


def test_rounds_of_the_turn_before_do_not_count() -> None:
    """Their drafts were asked for in it."""
    trial, before = TreeTrial(), False
    since = 0
    for _ in range(100):
        since = 0 if trial.asks != before else since + 1
        before = trial.asks
        old = since < 2
        trial.observe(1 if old else 2, 1e3 if old else 8.0)
    assert trial.save().log_gain == pytest.approx(0.0)
    assert trial.save().rest


def test_times_that_are_missing_prove_nothing() -> None:
    """A verifier that measures nothing must not end the orchestrator."""
    trial = TreeTrial()
    for _ in range(200):
        trial.observe(2, 0.0)
    assert trial.save().weight == 0.0


@pytest.mark.parametrize("gain", [1.4, 0.7])
def test_the_next_run_begins_with_the_verdict(gain: float) -> None:
    """And tries again after a while."""
    trial, restored = TreeTrial(), TreeTrial()
    run(trial, 1000, gain)
    restored.restore(trial.save())
    assert restored.save() == trial.save()
    assert restored.pays == restored.asks == (gain > 1.0)
    assert exp(restored.save().log_gain) == pytest.approx(gain, rel=0.2)
    run(restored, 6000, 1.0 / gain)
    assert restored.pays == (gain < 1.0)


@pytest.mark.parametrize("gain", [1.4, 0.7])
def test_a_trial_goes_on_from_run_to_run(gain: float) -> None:
    """Each answers one question and ends: together they find out."""
    saved, found = TreeTrial().save(), list[bool]()
    for seed in range(60):
        trial = TreeTrial()
        trial.restore(saved)
        run(trial, 30, gain, seed=seed)
        saved = trial.save()
        found.append(saved.pays)
    assert found[-1] == (gain > 1.0)


def cheap_rows() -> CostModel:
    """A pass of any size takes 20 ms and next to nothing more per row."""
    estimates = CostModel()
    for rows in (1, 2, 3, 4, 5, 8):
        for _ in range(8):
            estimates.verify_latency.observe(rows, 20.0 + 0.1 * rows)
    return estimates


PLAIN = {"speculating": False, "origin": "target", "confidences": [], "accepted": 0}


def pairs_after(rounds: int, **changes: Any) -> float:
    """Pairs of turns that are known after so many rounds of this kind."""
    estimates = cheap_rows()
    switch = estimates.switches["ssd"]
    told = {
        "chooses_trees": True,
        "idle_ms": 1.0,
        "verify_ms": 20.0,
        "confidences": [0.9],
        "accepted": 1,
    }
    for _ in range(rounds):
        now = {} if switch.speculating else PLAIN
        estimates.observe_round(observed(**{**told, **now, **changes}))
    return estimates.tree_trials["ssd"].save().weight


def test_rounds_behind_the_beginning_of_an_answer_do_not_count() -> None:
    """Answers of three rounds: of the last two the drafts are not there yet, or old."""
    estimates = cheap_rows()
    told = {"chooses_trees": True, "verify_ms": 20.0, "confidences": [0.9], "accepted": 1}
    for _ in range(40):
        for idle_ms in (None, 1.0, 1.0):
            estimates.observe_round(observed(**told, idle_ms=idle_ms))
    assert estimates.tree_trials["ssd"].save() == TreeTrial().save()


def test_rounds_of_the_planners_choice_count() -> None:
    assert pairs_after(40) >= 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"chooses_trees": False},
        {"by_hand": True},
        {"origin": "lookup"},
        {"speculating": False},
        {"idle_ms": None},
    ],
    ids=str,
)
def test_other_rounds_do_not_count(changes: dict[str, Any]) -> None:
    """By hand there is nothing to choose; a lookup is one with and without runners-up."""
    assert pairs_after(40, **changes) == 0.0


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_runners_up_are_asked_for_by_turns(mode: Mode) -> None:
    """One that fixed the size of its trees has them in any case."""
    estimates = cheap_rows()
    plan, fixed = Planner(mode, estimates), Planner(mode, estimates, tree_nodes=8)
    asked = []
    for _ in range(20):
        asked.append(plan.siblings > 0)
        assert fixed.siblings
        estimates.tree_trials[mode].observe(2, 8.0)
    assert asked == [False] * 10 + [True] * 10
    assert not Planner("ar", estimates).siblings


def test_prompt_lookups_fork_without_a_trial() -> None:
    """Their runners-up cost no drafter; only rows."""
    plan = Planner("ssd", cheap_rows())
    limits = limits_of(plan, verifier_takes_trees=True)
    found = LookupDrafts(plan, limits, None).find([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3])
    assert not plan.siblings
    first = [token for token, parent in zip(found.tokens, found.parents, strict=True) if not parent]
    assert first == [8, 9]


@pytest.mark.parametrize("takes", [(True, True), (True, False), (False, True)], ids=str)
def test_where_nobody_takes_trees_there_is_nothing_to_try(takes: tuple[bool, bool]) -> None:
    verifier, drafter = takes
    plan = Planner("ssd", cheap_rows())
    limits = limits_of(plan, verifier_takes_trees=verifier, drafter_takes_trees=drafter)
    told = Round([4]).observe(OUTCOME, limits, ended_at=1.0, last_token_at=0.5)
    assert told.chooses_trees == all(takes)


@pytest.mark.parametrize(
    "knobs", [{"tree_nodes": 8}, {"tree_nodes": 1}, {"num_draft_tokens": 3}, {"sampled": True}]
)
def test_what_is_fixed_by_hand_is_not_tried(knobs: dict[str, Any]) -> None:
    assert Planner("ssd", cheap_rows()).chooses_trees
    assert not Planner("ssd", cheap_rows(), **knobs).chooses_trees
    assert not Planner("ssd", CostModel()).chooses_trees  # rows may be dear


def test_others_do_not_take_part_in_a_trial() -> None:
    """What several requests at once are asked for follows the verdict."""
    estimates = cheap_rows()
    plan, trial = Planner("ssd", estimates), estimates.tree_trials["ssd"]
    for _ in range(10):
        trial.observe(2, 8.0)
    assert plan.siblings
    estimates.batch.streams = 2
    assert not plan.siblings
    run(trial, 400, 1.6)
    assert plan.siblings


def test_a_verdict_outlives_its_run() -> None:
    """Another orchestrator, with the same pair, begins with it; another drafter with nothing."""
    estimates, restarted = cheap_rows(), CostModel()
    run(estimates.tree_trials["ssd"], 400, 1.6)
    restarted.restart(estimates.save())
    assert restarted.tree_trials["ssd"].pays
    restarted.restart(None)
    assert not restarted.tree_trials["ssd"].pays
