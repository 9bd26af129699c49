"""Drafts as trees: paths, parts, and the order in which they are sent."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.sequence.draft import Draft
from orchestrator.sequence.speculation_cache import SpeculationCache
from protocol.decoding.token_tree import read_tree
from protocol.messages import END_OF_BRANCH, DraftTree
from tests.support.fakes import chain_of, tree_of

PARENTS = st.integers(0, 9).flatmap(
    lambda count: st.tuples(*(st.integers(0, row) for row in range(count)))
)


@given(PARENTS, st.data())
def test_a_part_keeps_its_paths(parents: tuple[int, ...], data: st.DataObject) -> None:
    """However it is arranged: every path has the tokens that it had, and parents come first."""
    whole = tree_of([0.5] * len(parents), parents)
    leaf = data.draw(st.integers(0, len(parents)))
    other = data.draw(st.integers(0, len(parents)))
    rows = whole.arrange({*whole.path(leaf), *whole.path(other)})
    part = whole.pick(rows)
    assert part.tokens_to(rows.index(leaf) + 1 if leaf else 0) == whole.tokens_to(leaf)
    assert sorted(part.tokens) == sorted({*whole.tokens_to(leaf), *whole.tokens_to(other)})
    read_tree([99, *part.tokens], part.sent_parents)  # raises if it is no tree


@given(PARENTS)
def test_the_likeliest_path_comes_first(parents: tuple[int, ...]) -> None:
    """So that its keys and values are in place if it is accepted."""
    whole = tree_of([0.5] * len(parents), parents)
    ordered = whole.pick(whole.arrange(range(1, len(whole) + 1)))
    assert ordered.main == list(range(1, len(whole.main) + 1))
    assert ordered.tokens_to(len(ordered.main)) == [whole.tokens[row - 1] for row in whole.main]
    assert ordered.depth == whole.depth


@given(PARENTS, st.data())
def test_what_follows_a_token_is_a_draft(parents: tuple[int, ...], data: st.DataObject) -> None:
    """With all paths through it, and no others."""
    whole = tree_of([0.5] * len(parents), parents)
    row = data.draw(st.integers(0, len(parents)))
    below = whole.below(row)
    paths = {tuple(whole.tokens_to(row)) for row in range(len(whole) + 1)}
    prefix = tuple(whole.tokens_to(row))
    expected = {path[len(prefix) :] for path in paths if path[: len(prefix)] == prefix}
    assert {tuple(below.tokens_to(row)) for row in range(len(below) + 1)} == expected


def test_chains_are_trees_without_siblings() -> None:
    """They are sent without parents; all their tokens are on the main path."""
    chain = chain_of([0.9, 0.8, 0.7])
    assert (chain.is_chain, chain.sent_parents, chain.depth) == (True, [], 3)
    assert (chain.main, chain.depths) == ([1, 2, 3], [0, 1, 2, 3])
    tree = tree_of([0.9, 0.1], [0, 0])
    assert (tree.is_chain, tree.sent_parents, tree.depth, tree.main) == (False, [0, 0], 1, [1])


def depth_of(depth: int, tokens: list[int], parents: list[int]) -> DraftTree:
    return DraftTree(
        sequence=1,
        round=1,
        depth=depth,
        outcomes=[(0, 5), (2, 7)] if depth == 1 else [],
        tokens=tokens,
        parents=parents,
        confidences=[0.5] * len(tokens),
        draft_ms=0.0,
    )


def test_branches_grow_into_trees() -> None:
    """A depth's tokens follow those of the depth before that they name."""
    cache = SpeculationCache()
    assert cache.add(depth_of(1, [1, 2, 3], [0, 0, 1]))
    assert cache.add(depth_of(2, [4, 5, 6], [1, 0, 0]))
    assert cache.add(depth_of(3, [7], [2]))
    first, second = cache.draft(0, 5), cache.draft(2, 7)
    paths = [first.tokens_to(row) for row in range(1, len(first) + 1)]
    assert paths == [[1], [2], [2, 4], [1, 5], [1, 6], [1, 6, 7]]
    assert second.tokens == [3]


def test_depths_that_are_no_tree_are_dropped() -> None:
    """Parents that are not there, the same token twice behind one, a parent too many or few; an
    end is no parent, and what follows it is left out."""
    for tokens, parents in (
        ([1, 2], [0, 2]),
        ([1, 1], [0, 0]),
        ([1, 2], [0]),
        ([1], [0, 0]),
        ([1, 2, 3], []),
    ):
        cache = SpeculationCache()
        assert not cache.add(depth_of(1, tokens, parents))
        assert (cache.depth, len(cache)) == (0, 0)
    cache = SpeculationCache()
    assert cache.add(depth_of(1, [1, END_OF_BRANCH, END_OF_BRANCH], [0, 0, 1]))
    assert not cache.add(depth_of(2, [4], [3]))
    assert cache.add(depth_of(2, [4, 5], [1, 0]))
    assert cache.draft(0, 5).tokens == [1, 5]


def test_what_was_not_verified_remains_behind_its_own_outcome() -> None:
    """Of each token that was left out, what follows it: if the target chooses it, that is a
    draft."""
    offered = Draft()
    best = offered.add(1, 0.9)
    side = offered.add(2, 0.1, parent=0)
    deep = offered.add(3, 0.9, parent=best)
    offered.add(4, 0.5, parent=side)
    offered.add(5, 0.5, parent=deep)
    cache = SpeculationCache()
    cache.inherit(offered, [best])
    assert len(cache) == 2
    assert cache.draft(0, 2).tokens == [4]
    assert cache.draft(1, 3).tokens == [5]
    whole = SpeculationCache()
    whole.inherit(offered, [best, side, deep, 4, 5])
    assert len(whole) == 0
