"""The speculation cache: outcome -> draft, depth by depth."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.sequence.draft import Draft
from orchestrator.sequence.speculation_cache import SpeculationCache
from protocol.messages import END_OF_BRANCH, DraftDistribution, DraftTree

OUTCOMES = [(0, 5), (1, 5), (2, 7)]


def confidence(token: int) -> float:
    """A number by which a token's confidence is recognised."""
    return token / 100


def tree(depth: int, tokens: list[int], outcomes: list[tuple[int, int]] | None = None) -> DraftTree:
    return DraftTree(
        sequence=1,
        round=1,
        depth=depth,
        outcomes=outcomes or [],
        tokens=tokens,
        confidences=[confidence(token) for token in tokens],
        draft_ms=0.0,
    )


def filled(*layers: list[int]) -> SpeculationCache:
    cache = SpeculationCache()
    for depth, tokens in enumerate(layers, start=1):
        assert cache.add(tree(depth, tokens, OUTCOMES if depth == 1 else None))
    return cache


def drafts(cache: SpeculationCache) -> list[list[int]]:
    return [cache.draft(*outcome).tokens for outcome in OUTCOMES]


def test_drafts_grow_depth_by_depth() -> None:
    """Each depth adds one token to every branch; a draft is usable at any depth."""
    assert drafts(filled([1, 2, 3])) == [[1], [2], [3]]
    cache = filled([1, 2, 3], [4, 5, 6], [7, 8, 9])
    assert drafts(cache) == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]
    assert cache.depth == 3
    assert len(cache) == 3


def test_other_outcomes_are_misses() -> None:
    """The key is the pair: another count of accepted tokens or another bonus token misses."""
    cache = filled([1, 2, 3])
    assert [cache.draft(*other).tokens for other in [(2, 5), (0, 7), (3, 7)]] == [[], [], []]
    assert not SpeculationCache().draft(0, 0)


def test_ended_branches_stay_ended() -> None:
    """A branch that has ended gets no further token, even if one is sent for it."""
    cache = filled([1, 2, 3], [4, END_OF_BRANCH, 6], [7, 8, END_OF_BRANCH])
    assert drafts(cache) == [[1, 4, 7], [2], [3, 6]]


def test_empty_branches_are_misses() -> None:
    """A branch that ended before its first token is not prepared."""
    cache = filled([1, END_OF_BRANCH, 3], [4, 5, 6])
    assert drafts(cache) == [[1, 4], [], [3, 6]]
    assert len(cache) == 2


@pytest.mark.parametrize("depth", [0, -1, 2, 3, 5])
def test_depths_out_of_order_are_dropped(depth: int) -> None:
    """Only the next depth is added: a repeated, missed or impossible one changes nothing."""
    cache = filled([1, 2, 3], [4, 5, 6])
    if depth == 3:
        assert cache.add(tree(3, [7, 8, 9]))
        assert not cache.add(tree(3, [7, 8, 9]))
        assert drafts(cache) == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]
        return
    assert not cache.add(tree(depth, [7, 8, 9], OUTCOMES))
    assert drafts(cache) == [[1, 4], [2, 5], [3, 6]]
    assert cache.depth == 2


def test_a_second_tree_is_dropped() -> None:
    """While a round lasts, a first depth of other outcomes does not replace what is there."""
    cache = filled([1, 2, 3])
    assert not cache.add(tree(1, [9], [(0, 9)]))
    assert drafts(cache) == [[1], [2], [3]]
    assert not cache.draft(0, 9)


@pytest.mark.parametrize("tokens", [[], [7, 8], [7, 8, 9, 10]])
def test_wrong_sized_depths_are_dropped(tokens: list[int]) -> None:
    """A depth with more or fewer tokens than there are branches changes nothing."""
    cache = SpeculationCache()
    assert not cache.add(tree(1, tokens, OUTCOMES))
    assert len(cache) == 0
    cache = filled([1, 2, 3])
    assert not cache.add(tree(2, tokens))
    assert drafts(cache) == [[1], [2], [3]]
    assert cache.add(tree(2, [4, 5, 6]))


def test_outcomes_named_twice_keep_one_draft() -> None:
    """Two branches for one outcome give one draft, never a mixture of both."""
    cache = SpeculationCache()
    assert cache.add(tree(1, [1, 2], [(0, 5), (0, 5)]))
    assert cache.add(tree(2, [3, 4]))
    assert cache.draft(0, 5).tokens == [1, 3]


def test_confidences_stay_with_their_tokens() -> None:
    """Each draft token keeps the confidence that it came with, also behind ended branches."""
    cache = filled([1, END_OF_BRANCH, 3], [4, 5, 6], [END_OF_BRANCH, 8, 9])
    for outcome in OUTCOMES:
        draft = cache.draft(*outcome)
        assert [confidence(token) for token in draft.tokens] == draft.confidences


@pytest.mark.parametrize("confidences", [[], [0.1, 0.2], [0.1, 0.2, 0.3, 0.4]])
def test_depths_without_their_confidences_are_dropped(confidences: list[float]) -> None:
    """A depth needs one confidence per token."""
    cache = SpeculationCache()
    wrong = msgspec.structs.replace(tree(1, [1, 2, 3], OUTCOMES), confidences=confidences)
    assert not cache.add(wrong)
    assert (cache.depth, len(cache)) == (0, 0)


def test_what_was_looked_up_does_not_grow() -> None:
    """A miss is a fresh empty draft: filling it changes no other one."""
    cache = SpeculationCache()
    cache.draft(0, 1).add(7, 0.5)
    assert not cache.draft(0, 1)
    assert not Draft()


def test_the_beginning_of_a_draft_is_a_draft_of_its_own() -> None:
    """A shortened draft has the first tokens and confidences, and leaves the whole alone."""
    whole = Draft([1, 2, 3], [0.1, 0.2, 0.3])
    assert Draft([1, 2], [0.1, 0.2]) == whole.pick([1, 2])
    assert whole == whole.pick([1, 2, 3])
    whole.pick([1]).add(9, 0.9)
    assert Draft([1, 2, 3], [0.1, 0.2, 0.3]) == whole


def drawn(depth: int, tokens: list[int], laws: list[DraftDistribution]) -> DraftTree:
    return msgspec.structs.replace(
        tree(depth, tokens, OUTCOMES if depth == 1 else None), distributions=laws
    )


def test_laws_stay_with_their_tokens() -> None:
    """A drawn token's law is kept, and its confidence is the law's, whatever came out."""
    laws = [
        DraftDistribution([1, 4], [0.25, 0.75]),
        DraftDistribution(),
        DraftDistribution([3, 9], [0.5, 0.5]),
    ]
    cache = SpeculationCache()
    assert cache.add(drawn(1, [1, 2, 3], laws))
    assert cache.add(tree(2, [4, 5, END_OF_BRANCH]))
    first, second, third = (cache.draft(*outcome) for outcome in OUTCOMES)
    assert (first.drawn_from, first.largest) == ([laws[0], DraftDistribution()], [4, 4])
    assert first.confidences == [0.75, confidence(4)]
    assert (second.drawn_from, second.largest) == ([], [2, 5])
    assert (third.drawn_from, third.largest) == ([laws[2]], [9])
    assert first.pick([1]).drawn_from == [laws[0]]


def test_a_law_that_cannot_be_ends_its_draft() -> None:
    """The token is not used, nor what follows it; other branches go on."""
    good, bad = DraftDistribution([2, 5], [0.5, 0.5]), DraftDistribution([2, 5], [0.5, 0.9])
    cache = SpeculationCache()
    assert cache.add(drawn(1, [2, 2, 2], [good, bad, good]))
    assert cache.add(drawn(2, [5, 5, 5], [bad, good, good]))
    assert cache.add(drawn(3, [5, 5, 5], [good, good, good]))
    assert drafts(cache) == [[2], [], [2, 5, 5]]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_depths_without_their_laws_are_dropped(count: int) -> None:
    """A depth has one law per token, or none at all."""
    cache = SpeculationCache()
    assert not cache.add(drawn(1, [1, 2, 3], [DraftDistribution()] * count))
    assert (cache.depth, len(cache)) == (0, 0)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), unique=True, max_size=6),
    st.integers(1, 5),
    st.data(),
)
def test_any_tree_is_kept_as_it_was_drafted(
    outcomes: list[tuple[int, int]], depth: int, data: st.DataObject
) -> None:
    """However many branches of whatever lengths: each outcome gets its own draft."""
    lengths = data.draw(st.lists(st.integers(0, depth), min_size=len(outcomes)))[: len(outcomes)]
    expected = {
        outcome: [10 * branch + level for level in range(length)]
        for branch, (outcome, length) in enumerate(zip(outcomes, lengths, strict=True))
    }
    cache = SpeculationCache()
    for level in range(depth):
        layer = [d[level] if level < len(d) else END_OF_BRANCH for d in expected.values()]
        assert cache.add(tree(level + 1, layer, outcomes))
    assert expected == {outcome: cache.draft(*outcome).tokens for outcome in outcomes}
    assert len(cache) == sum(1 for draft in expected.values() if draft)


TOKENS = st.lists(st.integers(0, 9), max_size=6)


def draft_of(tokens: list[int]) -> Draft:
    draft = Draft()
    for token in tokens:
        draft.add(token, confidence(token))
    return draft


@given(TOKENS, st.integers(0, 6), st.integers(0, 9), st.integers(0, 9))
def test_a_rest_is_inherited(rest: list[int], verified: int, accepted: int, bonus: int) -> None:
    """Where all was accepted and the bonus token is the first of the rest, the others remain."""
    cache = SpeculationCache()
    useful = len(rest) > 1
    offered = draft_of([*range(verified), *rest])
    cache.inherit(offered, range(1, verified + 1))
    assert int(useful) == len(cache)
    expected = rest[1:] if useful and (verified, rest[0]) == (accepted, bonus) else []
    draft = cache.draft(accepted, bonus)
    assert (expected, [confidence(token) for token in expected]) == (
        draft.tokens,
        draft.confidences,
    )
    assert cache.rank(accepted, bonus) == (None, 0)


@given(TOKENS.filter(lambda rest: len(rest) > 1))
def test_the_longer_of_two_drafts_is_used(rest: list[int]) -> None:
    """What the drafter prepares replaces an inherited draft once it is as long."""
    cache = SpeculationCache()
    cache.inherit(draft_of(rest), [])
    outcomes = [(0, rest[0]), (0, rest[0] + 1)]
    for depth in range(1, 8):
        assert cache.add(tree(depth, [50 + depth, 60], outcomes if depth == 1 else None))
        prepared = [50 + level for level in range(1, depth + 1)]
        shown = prepared if depth >= len(rest) - 1 else rest[1:]
        assert shown == cache.draft(0, rest[0]).tokens
    assert cache.rank(0, rest[0]) == (0, 2)
