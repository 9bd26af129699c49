"""Which nodes of a draft are verified. Pure."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.learning.cost_model import CostModel
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.tree_choice import count_chain, find_best, rank_nodes
from tests.support.fakes import tree_of


@st.composite
def trees(draw: st.DrawFn, most: int = 7) -> tuple[list[int], list[float]]:
    """Parents and rates of a tree; the rates of siblings sum to one at most."""
    count = draw(st.integers(0, most))
    parents = [draw(st.integers(0, row)) for row in range(count)]
    left: dict[int, float] = {}
    rates = []
    for parent in parents:
        rate = draw(st.floats(0.0, 1.0)) * left.get(parent, 1.0)
        left[parent] = left.get(parent, 1.0) - rate
        rates.append(rate)
    return parents, rates


@given(trees())
def test_the_likeliest_nodes_are_the_best_tree_of_their_number(
    tree: tuple[list[int], list[float]],
) -> None:
    """No other tree of as many nodes is expected to bring more tokens; tried are all of them."""
    parents, rates = tree
    rows, ranked = rank_nodes(parents, rates)
    chances = dict(zip(rows, ranked, strict=True))
    for size in range(len(parents) + 1):
        chosen = rows[:size]
        assert all(parents[row - 1] in (0, *chosen) for row in chosen)
        possible = (
            subset
            for subset in combinations(range(1, len(parents) + 1), size)
            if all(parents[row - 1] in (0, *subset) for row in subset)
        )
        best = max(sum(chances[row] for row in subset) for subset in possible)
        assert sum(ranked[:size]) == pytest.approx(best)


def test_parents_stand_before_children_that_are_as_likely() -> None:
    """Certain tokens keep their order."""
    assert rank_nodes([0, 1, 2], [1.0, 1.0, 1.0])[0] == [1, 2, 3]
    assert find_best([1.0, 3.0, 3.0]) == 1


def test_a_beginning_may_be_a_chain() -> None:
    """Counted are the rows that follow one another."""
    parents = [0, 1, 0, 2]
    assert count_chain([1, 2, 4, 3], parents) == 3
    assert count_chain([1, 3, 2], parents) == 1
    assert count_chain([], parents) == 0


def test_passes_have_few_sizes() -> None:
    """Of up to 8 rows chains have any length, beyond that one of some."""
    rising = [float(count) for count in range(11)]
    assert [find_best(rising[: count + 1]) for count in range(8)] == list(range(8))
    assert find_best(rising) == 9
    assert find_best([0.0, 5.0, 4.0, 1.0]) == 1


def learned(row_ms: float) -> CostModel:
    """A pass takes 20 ms and `row_ms` per row."""
    estimates = CostModel()
    estimates.verify_latency.expect({rows: 20.0 + row_ms * rows for rows in (1, 32)})
    return estimates


def test_chains_stay_chains_where_they_must() -> None:
    """Under the rejection rule, and unless trees are asked for."""
    cheap = learned(0.1)
    assert Planner("ssd", cheap, sampled=True, tree_nodes=8).siblings == 0
    assert Planner("ssd", cheap).siblings == 0
    assert Planner("ssd", cheap, tree_nodes=1).siblings == 0
    assert Planner("ssd", cheap, tree_nodes=0).siblings == 0
    assert Planner("ssd", learned(9.0), tree_nodes=6).siblings > 0


SPREAD = tree_of([0.55, 0.9, 0.9, 0.35, 0.3, 0.3], [0, 1, 2, 0, 0, 1])
"""Rows 1, 2, 3 are a chain; 4 and 5 are row 1's siblings, 6 is row 2's."""


def test_a_number_of_nodes_is_kept() -> None:
    """The likeliest ones, whatever they cost; chains where that was asked for."""
    dear = learned(9.0)
    for nodes in (2, 3, 4, 5, 6):
        chosen = Planner("ssd", dear, tree_nodes=nodes).choose_nodes(SPREAD, "hit")
        assert len(chosen) == nodes
        assert all(SPREAD.parents[row - 1] in (0, *chosen) for row in chosen)
    assert set(Planner("ssd", dear, tree_nodes=1).choose_nodes(SPREAD, "hit")) <= {1, 2, 3}
    short = Planner("ssd", dear, num_draft_tokens=1, tree_nodes=4)
    assert set(short.choose_nodes(SPREAD, "hit")) == {1, 4, 5}


@given(trees())
def test_outcomes_are_shared_out_over_all_rows(tree: tuple[list[int], list[float]]) -> None:
    """A count for each row, the budget in all."""
    parents, rates = tree
    plan = Planner("ssd", learned(0.1), fixed_branches=12)
    counts = plan.fan_out(tree_of(rates, parents), "hit")
    assert len(counts) == len(parents) + 1
    assert sum(counts) == 12
    assert min(counts) >= 0
