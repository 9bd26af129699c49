"""Trees of tokens: what a message may say, and what follows from it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.errors import ProtocolError
from protocol.messages import MAX_NODES, Prepare, Verify

#         0
#       1   2
#      3 4   5
#      6
TREE = read_tree([9, 1, 2, 5, 6, 5, 1], [0, 0, 1, 1, 2, 3])


@st.composite
def trees(draw: st.DrawFn, most: int = 12, vocabulary: int = 4) -> TokenTree:
    """A tree of up to so many draft tokens; siblings differ."""
    tokens, parents = [draw(st.integers(0, vocabulary - 1))], list[int]()
    children: list[set[int]] = [set()]
    for row in range(1, draw(st.integers(0, most)) + 1):
        parent = draw(st.sampled_from([r for r in range(row) if len(children[r]) < vocabulary]))
        free = sorted(set(range(vocabulary)) - children[parent])
        token = draw(st.sampled_from(free))
        children[parent].add(token)
        children.append(set())
        tokens.append(token)
        parents.append(parent)
    return read_tree(tokens, parents)


def test_paths_depths_and_children() -> None:
    assert TREE.depths == [0, 1, 1, 2, 2, 2, 3]
    assert TREE.path(6) == [0, 1, 3, 6]
    assert TREE.tokens_to(6) == [9, 1, 5, 1]
    assert TREE.children[:3] == [{1: 1, 2: 2}, {5: 3, 6: 4}, {5: 5}]
    assert not TREE.is_chain
    assert TREE.keep([0, 1, 3, 6]) == read_tree([9, 1, 5, 1], [])
    assert TREE.keep([0, 2, 5]).is_chain


def test_a_walk_follows_the_choices_until_one_is_no_child() -> None:
    assert TREE.walk([1, 5, 0, 1, 0, 0, 7]) == [0, 1, 3, 6]
    assert TREE.walk([2, 5, 5, 1, 0, 3, 7]) == [0, 2, 5]
    assert TREE.walk([3, 5, 5, 1, 0, 3, 7]) == [0]


def test_a_chain_says_nothing_of_parents() -> None:
    assert read_tree([4, 5, 6], []) == read_tree([4, 5, 6], [0, 1])
    assert read_tree([4, 5, 6], [0, 1]).sent_parents == []
    assert TREE.sent_parents == [0, 0, 1, 1, 2, 3]
    assert read_tree(list(range(5 * MAX_NODES)), []).is_chain  # the verifier bounds its length


@given(trees())
def test_a_row_sees_its_path(tree: TokenTree) -> None:
    mask = tree.visible()
    for row in range(len(tree)):
        assert [r for r in range(len(tree)) if mask[row, r]] == tree.path(row)
        assert tree.depths[row] == len(tree.path(row)) - 1
    assert read_tree(tree.tokens, tree.sent_parents) == tree


@pytest.mark.parametrize(
    ("tokens", "parents", "why"),
    [
        ([], [], "without tokens"),
        ([1, 2], [0, 0], "2 parents for 1 draft tokens"),
        ([1, 2, 3], [0], "1 parents for 2 draft tokens"),
        ([1, 2, 3], [1, 0], "row 1 of a tree cannot follow row 1"),
        ([1, 2, 3], [2, 0], "row 1 of a tree cannot follow row 2"),
        ([1, 2, 3], [0, 7], "row 2 of a tree cannot follow row 7"),
        ([1, 2, 3], [0, -1], "row 2 of a tree cannot follow row -1"),
        ([1, 2, 2], [0, 0], "siblings"),
        (list(range(MAX_NODES + 2)), [0] * (MAX_NODES + 1), "more than 64"),
    ],
)
def test_what_is_no_tree_is_refused(tokens: list[int], parents: list[int], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        read_tree(tokens, parents)


def test_a_chain_costs_nothing_more_on_the_wire() -> None:
    """A tree of one branch is sent as a chain: the same bytes, and no word of trees in them."""
    chain = read_tree([5, 6, 7], [0, 1])
    verify = Verify(sequence=1, round=2, position=9, nodes=chain.tokens)
    sent = msgspec.msgpack.encode(msgspec.structs.replace(verify, parents=chain.sent_parents))
    assert sent == msgspec.msgpack.encode(verify)
    prepare = Prepare(
        sequence=1,
        round=2,
        base=8,
        tokens=[],
        nodes=chain.tokens,
        parents=chain.sent_parents,
        fan_out=[1, 1, 2],
        depth=3,
        siblings=0,
    )
    for message in (sent, msgspec.msgpack.encode(prepare)):
        assert not any(word in message for word in (b"parents", b"siblings"))
