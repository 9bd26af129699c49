"""What runners-up that grow on are worth, by what was measured."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.tree_growth import (
    GROWN,
    CostBehindTrees,
    TreeGrowth,
    grow,
    rank_chances,
    value_by_depth,
    value_trees,
)
from orchestrator.sequence.planner import Planner
from tests.support.fakes import observed, tree_of

RANKS = [0.6, 0.2, 0.1]
CHANCES = st.lists(st.floats(0.01, 0.3), min_size=1, max_size=3)


def test_ranks_share_what_first_choices_leave() -> None:
    """A runner-up is right where the first choice fell and it is the next in question."""
    assert rank_chances(0.6, [0.0, 0.5, 0.75]) == pytest.approx([0.6, 0.2, 0.1])


def test_runners_up_are_leaves_unless_they_grow() -> None:
    """Without growth each depth has the chain's candidates; with it, those of the likeliest."""
    ranks = np.array(RANKS)
    for layer, chance in zip(grow([1.0], RANKS, 0, 3), (1.0, 0.6, 0.36), strict=True):
        assert layer.chances == pytest.approx(chance * ranks)
    _, second, third = grow([1.0], RANKS, 1, 3)
    assert second.chances == pytest.approx(
        np.concatenate([0.6 * np.array(RANKS), 0.2 * np.array(RANKS)])
    )
    # Behind the second depth, 0.6 x 0.2 and 0.2 x 0.6 are alike: one of them goes on.
    assert third.chances == pytest.approx(
        np.concatenate([0.36 * np.array(RANKS), 0.12 * np.array(RANKS)])
    )


def test_likelier_outcomes_have_the_runners_up() -> None:
    """All branches compete for what goes on."""
    _, second = grow([0.8, 0.1], RANKS, 2, 2)
    assert np.bincount(second.owners).tolist() == [9, 3]


@given(CHANCES, CHANCES, st.integers(1, 4), st.floats(0.0, 0.4))
def test_growth_only_adds(
    outcomes: list[float], ranks: list[float], depth: int, row_cost: float
) -> None:
    """More growth at the same depth is never worth less, and rows that cost more never more."""
    values = [
        value_trees(outcomes, grow(outcomes, ranks, grown, depth), [row_cost] * 8)
        for grown in GROWN
    ]
    assert values == sorted(values)
    dearer = value_trees(outcomes, grow(outcomes, ranks, 0, depth), [2.0 * row_cost] * 8)
    assert 0.0 <= dearer <= values[0] + 1e-12


def test_a_value_lies_between_those_of_its_depths() -> None:
    """Half a depth more is half of what a depth brings."""
    free = [0.0] * 20
    values = [value_by_depth([1.0], RANKS, 4, depth, free) for depth in (2.0, 2.5, 3.0)]
    assert values[1] == pytest.approx((values[0] + values[2]) / 2)
    assert value_by_depth([1.0], RANKS, 4, 0.0, free) == 0.0


def test_what_gains_most_is_taken() -> None:
    """From the first computation on; a difference of nothing changes nothing."""
    growth = TreeGrowth()
    assert growth.grown == 0
    assert growth.is_due()
    growth.observe([1.0, 1.2, 1.5, 1.4])
    assert growth.grown == GROWN[2]
    growth.observe([1.0, 1.2, 1.5, 1.51])
    assert growth.grown == GROWN[2]
    assert sum(growth.is_due() for _ in range(80)) == 10


@given(CHANCES, CHANCES, st.integers(0, 6), st.integers(1, 3), st.floats(0.0, 0.4))
def test_the_value_is_that_of_each_tree_by_itself(
    outcomes: list[float], ranks: list[float], grown: int, depth: int, row_cost: float
) -> None:
    """Each has its likeliest nodes verified, as many as are worth their rows."""
    costs = [row_cost * (1 + place / 4) for place in range(4)]
    layers = grow(outcomes, ranks, grown, depth)
    expected = 0.0
    for owner, share in enumerate(outcomes):
        nodes = [
            chance
            for layer in layers
            for chance, of in zip(layer.chances, layer.owners, strict=True)
            if of == owner
        ]
        best = sorted(nodes, reverse=True)[: len(costs)]
        gains = [best[place] - costs[place] for place in range(len(best))]
        expected += share * max(sum(gains[:count]) for count in range(len(gains) + 1))
    assert value_trees(outcomes, layers, costs) == pytest.approx(expected)


TREE = {"confidences": [0.6, 0.3], "parents": [0, 0]}


@pytest.mark.parametrize("longer_ms", [0.0, 4.0, -2.0])
def test_a_pass_behind_a_tree_may_take_longer(longer_ms: float) -> None:
    """Whatever it verifies itself; what stands still for long says nothing."""
    cost = CostBehindTrees()
    kinds: list[dict[str, Any]] = [{"confidences": [0.5]}, TREE, TREE, {"confidences": [0.5]}]
    behind = 0.0
    for number in range(60):
        kind = kinds[number % 4]
        stall = 100.0 if number == 30 else 0.0
        seen = observed(verify_ms=10.0 + behind + stall, idle_ms=1.0, **kind)
        cost.observe(seen, 10.0)
        behind = longer_ms if seen.is_tree else 0.0
        if number < 15:
            assert cost.milliseconds == 0.0
    assert cost.milliseconds == pytest.approx(max(0.0, longer_ms), abs=1.5)
    assert cost.milliseconds >= 0.0


@pytest.mark.parametrize(
    "changes",
    [{"speculating": False}, {"sequences": 2}, {"idle_ms": None}],
    ids=str,
)
def test_what_comes_behind_something_else_does_not_count(changes: dict[str, Any]) -> None:
    """A plain token, others' tokens, or another request."""
    cost = CostBehindTrees()
    chain = {"confidences": [0.5]}
    for _ in range(20):
        for kind in (chain, chain, TREE, TREE):
            cost.observe(observed(verify_ms=10.0, idle_ms=1.0, **kind), 10.0)
        cost.observe(observed(**{"verify_ms": 25.0, "idle_ms": 1.0, **chain, **changes}), 10.0)
    assert cost.milliseconds == 0.0


def test_trees_are_chosen_if_they_are_worth_what_they_cost_later() -> None:
    estimates = CostModel()
    for tokens in range(1, 9):
        for latency in (estimates.verify_latency, estimates.tree_latency):
            latency.observe(tokens, 10.0 + 0.1 * tokens)
    plan, draft = Planner("ssd", estimates), tree_of([0.5, 0.3], [0, 0])
    assert plan.choose_nodes(draft, "hit") == [1, 2]
    for _ in range(20):
        estimates.observe_round(observed(verify_ms=10.0, idle_ms=1.0, **TREE))
        estimates.observe_round(observed(verify_ms=20.0, idle_ms=1.0, confidences=[0.5]))
        estimates.observe_round(observed(verify_ms=10.0, idle_ms=1.0, confidences=[0.5]))
    assert estimates.behind_trees.milliseconds > 3.0
    assert plan.choose_nodes(draft, "hit") == [1]
