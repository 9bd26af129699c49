"""Whether trees pay as a whole: by turns with runners-up and without."""

from math import exp
from typing import Any

import numpy as np
import pytest

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.tree_growth import TreeTrial
from orchestrator.sequence.planner import Planner
from protocol.messages import Mode
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
            trial.on_new_text()
            usual = float(random.uniform(1.5, 3.5))
        tokens = 1.0 + (gain * usual - 1.0) if trial.asks else usual
        asked += trial.asks
        trial.observe(int(random.poisson(tokens - 1.0)) + 1, 8.0)
    return asked


def test_turns_are_taken() -> None:
    """The first one is without; who came second comes first in the next pair."""
    trial, asked = TreeTrial(), []
    for _ in range(40):
        asked.append(trial.asks)
        trial.observe(2, 8.0)
    assert asked == [False] * 10 + [True] * 20 + [False] * 10


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


def test_what_is_equal_stays_a_chain() -> None:
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


def test_a_turn_is_compared_with_one_of_the_same_text() -> None:
    """Half a pair says nothing: texts differ more than trees and chains do."""
    trial = TreeTrial()
    for _ in range(30):
        trial.on_new_text()
        for _ in range(15):
            trial.observe(2, 8.0)
    assert trial.save().pairs == 0.0


def test_rounds_between_two_turns_do_not_count() -> None:
    """Their drafts were asked for in the turn before."""
    trial = TreeTrial()
    for number in range(20):
        trial.observe(1 if number % 10 < 2 else 2, 1e3 if number % 10 < 2 else 8.0)
    assert trial.save().logarithm == 0.0
    assert trial.save().pairs == 1.0


def test_times_that_are_missing_prove_nothing() -> None:
    """A verifier that measures nothing must not end the orchestrator."""
    trial = TreeTrial()
    for _ in range(200):
        trial.observe(2, 0.0)
    assert trial.save().pairs == 0.0


@pytest.mark.parametrize("gain", [1.4, 0.7])
def test_the_next_run_begins_with_the_verdict(gain: float) -> None:
    """And tries again after a while."""
    trial, restored = TreeTrial(), TreeTrial()
    run(trial, 1000, gain)
    restored.restore(trial.save())
    assert restored.pays == restored.asks == (gain > 1.0)
    assert exp(restored.save().logarithm) == pytest.approx(gain, rel=0.15)
    run(restored, 4000, 1.0 / gain)
    assert restored.pays == (gain < 1.0)


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
        "may_fork": True,
        "idle_ms": 1.0,
        "verify_ms": 20.0,
        "confidences": [0.9],
        "accepted": 1,
    }
    for _ in range(rounds):
        now = {} if switch.speculating else PLAIN
        estimates.observe_round(observed(**{**told, **now, **changes}))
    return estimates.tree_trials["ssd"].save().pairs


def test_rounds_of_the_planners_choice_count() -> None:
    assert pairs_after(40) >= 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"may_fork": False},
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
