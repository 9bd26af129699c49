"""Prompt lookup: what followed the last time, for every outcome, without a model."""

import json
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.decoding.token_tree import read_tree
from protocol.errors import ProtocolError
from protocol.messages import END_OF_BRANCH, LogitsOptions, Sampling, Tokens
from services.drafter.backends.base import Outcome, RoundOptions, TreeLayer
from services.drafter.backends.ngram import NgramBackend
from tests.support.reference import tiny_folder
from tests.support.tiny_models import EOS

NUMBERS = count(1)
SHORTEST, LONGEST = 2, 4


def opened(tokens: Tokens) -> tuple[NgramBackend, int]:
    backend, number = NgramBackend(), next(NUMBERS)
    list(backend.open(number, tokens, Sampling()))
    return backend, number


def drafted(tokens: Tokens, pending: int, wanted: int) -> Tokens:
    backend, number = opened(tokens)
    return [token for token, *_ in backend.draft(number, pending, wanted)]


def prepared(
    tokens: Tokens, chain: Tokens, fan_out: list[int], depth: int
) -> tuple[list[TreeLayer], dict[Outcome, Tokens]]:
    """The layers, and the draft of each outcome that they spell."""
    backend, number = opened(tokens)
    layers = list(backend.prepare(number, chain, fan_out, depth))
    roots = layers[0].outcomes if layers else []
    return layers, {
        root: [layer.tokens[at] for layer in layers if layer.tokens[at] != END_OF_BRANCH]
        for at, root in enumerate(roots)
    }


def lookup(tokens: Tokens, wanted: int) -> Tokens:
    """By brute force: what followed the latest place that looks most like the end."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                return tokens[end : end + wanted]
    return []


texts = st.lists(st.integers(0, 3), max_size=24)


def test_what_followed_the_last_time_is_drafted() -> None:
    """After words that were said before comes what came then, as far as it goes."""
    tokens = [1, 2, 3, 4, 5, 6, 9, 1, 2]
    assert drafted(tokens, 3, 2) == [4, 5]
    assert drafted(tokens, 3, 99) == [4, 5, 6, 9, 1, 2, 3]


def test_the_longest_match_wins_then_the_latest() -> None:
    """Four equal words beat two more recent ones; among equals the latest counts."""
    assert drafted([1, 2, 3, 4, 70, 3, 4, 80, 1, 2, 3], 4, 1) == [70]
    assert drafted([3, 4, 70, 9, 3, 4, 80, 9, 3], 4, 1) == [80]


def test_one_equal_word_is_no_match() -> None:
    """What is new, or was said once as a single word, is not drafted for."""
    assert drafted([1, 2, 3], 9, 4) == []
    assert drafted([1, 2, 3, 7], 2, 4) == []
    assert drafted([], 1, 4) == []
    assert drafted([1], 1, 4) == []


@given(tokens=texts, pending=st.integers(0, 3), wanted=st.integers(0, 6))
def test_drafts_are_the_best_lookup(tokens: Tokens, pending: int, wanted: int) -> None:
    """On any text the draft is that of a search through all of it."""
    assert lookup([*tokens, pending], wanted) == drafted(tokens, pending, wanted)


def test_longer_matches_are_surer() -> None:
    """Confidence is between 0 and 1 and grows with the length of the match."""
    told = []
    for length in (2, 3, 4):
        said = list(range(10, 10 + length))
        backend, number = opened([*said, 50, 99, *said[:-1]])
        [(token, confidence, _)] = backend.draft(number, said[-1], 1)
        assert token == 50
        told.append(confidence)
    assert sorted(told) == told
    assert len(set(told)) == 3
    assert 0 < told[0] < told[2] < 1


def test_every_acceptance_length_has_its_outcomes() -> None:
    """The bonus tokens after k accepted tokens are those that followed these words before."""
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 7, 8, 5, 9, 1]
    layers, drafts = prepared(tokens, [2, 3], [2, 1], 2)
    assert drafts == {Outcome(0, 7): [8, 5], Outcome(1, 4): [5, 9]}
    assert [layer.outcomes for layer in layers] == [layers[0].outcomes] * 2


def test_the_rejected_token_is_not_a_bonus() -> None:
    """Before the end of the chain chain[k + 1] is left out, and the next best takes its place."""
    tokens = [1, 2, 3, 8, 9, 1, 2, 4, 8, 9, 1]
    assert set(prepared(tokens, [2], [1], 1)[1]) == {Outcome(0, 4)}
    assert set(prepared(tokens, [2, 4], [1], 1)[1]) == {Outcome(0, 3)}
    assert set(prepared(tokens, [2, 3], [2], 1)[1]) == {Outcome(0, 4)}


def test_the_end_of_the_chain_excludes_nothing() -> None:
    """At k = K any token may come, also one that the chain has elsewhere."""
    tokens = [1, 2, 3, 1, 2, 3, 1]
    assert Outcome(1, 1) in prepared(tokens, [2, 3], [0, 1], 1)[1]


def test_ragged_drafts_end_in_ended() -> None:
    """A branch that ends early says ENDED at every later depth; the others go on."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 9, 6, 7, 1]
    layers, drafts = prepared(tokens, [2], [2], 50)
    assert drafts[Outcome(0, 9)] == [6, 7, 1, 2, 9]
    assert drafts[Outcome(0, 3)] == [4, 5, 6, 7, 8, 1, 2, 9, 6, 7, 1, 2, 3]
    at = layers[0].outcomes.index(Outcome(0, 9))
    assert [layer.tokens[at] for layer in layers] == [6, 7, 1, 2, 9] + [END_OF_BRANCH] * 8
    assert all(len(layer.tokens) == len(layer.confidences) == 2 for layer in layers)


def test_nothing_to_say_is_no_layer() -> None:
    """Without a match, a fan-out or a depth nothing is yielded."""
    assert prepared([1, 2, 3], [9, 8], [4, 4], 3)[0] == []
    assert prepared([1, 2, 3, 1], [2], [0], 3)[0] == []
    assert prepared([1, 2, 3, 1], [2], [1], 0)[0] == []


@given(
    tokens=texts,
    chain=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    fan_out=st.lists(st.integers(0, 3), max_size=5),
    depth=st.integers(1, 4),
)
def test_branches_are_drafts_of_their_own_prefix(
    tokens: Tokens, chain: Tokens, fan_out: list[int], depth: int
) -> None:
    """Each branch is what would be drafted had its outcome come true; no outcome comes twice."""
    fan_out = fan_out[: len(chain)]
    layers, drafts = prepared(tokens, chain, fan_out, depth)
    assert len(drafts) == len(layers[0].outcomes if layers else [])
    for (accepted, bonus), draft in drafts.items():
        assert bonus not in chain[accepted + 1 : accepted + 2]
        assert lookup([*tokens, *chain[: accepted + 1], bonus], depth) == draft
    for accepted, wanted in enumerate(fan_out):
        assert sum(root.accepted == accepted for root in drafts) <= wanted


def test_a_banned_token_is_no_draft_and_no_outcome() -> None:
    """The next place is taken in the place of one that goes on with it; a chain ends before it."""
    ban = Sampling(logits_options=LogitsOptions(logit_bias=((4, -100.0),)))
    backend = NgramBackend()
    list(backend.open(1, [1, 2, 3, 5, 9, 1, 2, 4, 8, 9, 1, 2, 7, 4, 1], ban))
    assert [token for token, *_ in backend.draft(1, 2, 3)] == [7]
    [layer, *_] = backend.prepare(1, [2], [3], 2)
    assert layer.outcomes == [Outcome(0, 3)]


def test_what_a_grammar_forbids_is_no_draft() -> None:
    """Places that go on as the grammar wants are found, whatever came last; commits move it."""
    folder = tiny_folder("llama")
    table = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    said = [table[character] for character in "xyabxyacxyzx"]
    shape = LogitsOptions(
        grammar='start: "xyac" "xyac"', answer_from=len(said) - 1, stop_ids=(EOS,)
    )
    pending = table["y"]

    def drafted_by(backend: NgramBackend) -> Tokens:
        return [token for token, *_ in backend.draft(1, pending, 9)]

    for home, expected in ((None, "zx"), (folder, "acxy")):
        backend = NgramBackend(home)
        list(backend.open(1, said, Sampling(logits_options=shape)))
        assert drafted_by(backend)[: len(expected)] == [table[c] for c in expected]
    assert len(drafted_by(backend)) == 4  # then came z, and may not
    assert [layer.outcomes for layer in backend.prepare(1, [pending], [4], 1)] == [
        [Outcome(0, table["a"])]
    ]
    backend.commit(1, len(said), [table[c] for c in "yac"])
    backend.commit(1, len(said) + 3, [table["x"]])
    assert drafted_by(backend) == [table["a"], table["c"]]  # and there the grammar ends
    backend.commit(1, len(said), [])
    assert drafted_by(backend) == [table[c] for c in "acxy"]


def test_commits_append_and_rewind() -> None:
    """`commit` keeps the first `base` tokens and appends; drafts follow from what is left."""
    backend, number = opened([1, 2, 3, 4])
    backend.commit(number, 4, [9, 1, 2])
    assert [token for token, *_ in backend.draft(number, 3, 2)] == [4, 9]
    backend.commit(number, 3, [7, 7, 1, 2])
    assert [token for token, *_ in backend.draft(number, 3, 2)] == [7, 7]
    backend.commit(number, 0, [])
    assert list(backend.draft(number, 3, 2)) == []
    with pytest.raises(ProtocolError, match="cannot rewind 0 tokens to 1"):
        backend.commit(number, 1, [])


def test_preparing_commits_nothing() -> None:
    """The chain under verification is not remembered, nor is the caller's list shared."""
    told = [1, 2, 3, 4, 1]
    backend, number = opened(told)
    list(backend.prepare(number, [2, 8, 8], [1, 1, 1], 2))
    list(backend.draft(number, 2, 3))
    told.clear()
    backend.commit(number, 5, [2])
    assert [token for token, *_ in backend.draft(number, 3, 9)] == [4, 1, 2, 3]


def test_sequences_are_apart_and_unknown_ones_refused() -> None:
    """Every sequence has its own words; one that is not open is a ProtocolError."""
    backend = NgramBackend()
    for number in (1, 2):
        list(backend.open(number, [5, 6, number, 5], Sampling()))
    assert [[t for t, *_ in backend.draft(n, 6, 1)] for n in (1, 2)] == [[1], [2]]
    backend.close(1)
    backend.close(1)
    with pytest.raises(ProtocolError, match="sequence 1 is not open"):
        backend.commit(1, 0, [])
    assert [token for token, *_ in backend.draft(2, 6, 1)] == [2]


def test_no_model_means_no_vocabulary() -> None:
    """The identity claims neither a tokenizer nor a context, so it fits every target."""
    identity = NgramBackend().identity
    assert (identity.tokenizer_fingerprint, identity.vocabulary_size) == ("", 0)
    assert (identity.model, identity.context_length) == ("", 0)


TEXT = [1, 2, 3, 4, 5, 9, 1, 2, 6, 7, 8, 9, 1, 2, 3, 3, 9, 1]
"""After 1, 2 came 3 (twice, last time followed by 3) and 6."""


def paths(layers: list[TreeLayer]) -> list[Tokens]:
    """The drafts that layers with parents spell, each with its outcome's index first."""
    before = [[place] for place in range(len(layers[0].outcomes))]
    found: list[Tokens] = []
    for layer in layers:
        after = [[*before[p], t] for p, t in zip(layer.parents, layer.tokens, strict=True)]
        found += [path for path in before if path[1:] and path not in [a[:-1] for a in after]]
        before = after
    return found + before


def test_places_that_went_on_differently_are_siblings() -> None:
    """Each is a path of its own; the likeliest comes first, the others are less sure."""
    backend, number = opened(TEXT)
    options = RoundOptions(siblings=2)
    layers = list(backend.draft_tree(number, 2, 3, options))
    assert layers[0].outcomes == [Outcome(0, 2)]
    assert sorted(paths(layers)) == [[0, 3, 3, 9], [0, 3, 4, 5], [0, 6, 7, 8]]
    assert layers[0].tokens == [3, 6]
    assert layers[0].confidences[1] < layers[0].confidences[0]
    assert layers[1].tokens == [3, 7, 4]
    assert layers[1].confidences[1] == layers[1].confidences[0]
    assert layers[1].confidences[2] < layers[1].confidences[0]  # where two places part
    [first, *_] = layers = list(backend.draft_tree(number, 2, 3, RoundOptions(siblings=1)))
    assert sorted(paths(layers)) == [[0, 3, 3, 9], [0, 6, 7, 8]]  # two branches at most
    assert first.tokens == [3, 6]


def test_outcomes_of_a_tree_are_looked_up_behind_each_row() -> None:
    """Children of a row are no bonus tokens of it; each branch forks where places differ."""
    backend, number = opened(TEXT)
    tree = read_tree([2, 3, 6], [0, 0])
    layers = list(backend.prepare_tree(number, tree, [2, 2, 2], 2, RoundOptions(siblings=1)))
    outcomes = layers[0].outcomes
    assert [outcome for outcome in outcomes if outcome.accepted == 0] == []
    assert Outcome(1, 3) in outcomes
    assert Outcome(2, 7) in outcomes
    place = outcomes.index(Outcome(2, 7))
    assert [path for path in paths(layers) if path[0] == place] == [[place, 8, 9]]


@given(
    tokens=texts,
    chain=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    depth=st.integers(0, 4),
    siblings=st.integers(1, 3),
)
def test_the_first_sibling_is_the_draft_without_siblings(
    tokens: Tokens, chain: Tokens, depth: int, siblings: int
) -> None:
    """Siblings only add to what is drafted, and no two paths are alike."""
    fan_out = [2] * len(chain)
    _, alone = prepared(tokens, chain, fan_out, depth)
    backend, number = opened(tokens)
    options = RoundOptions(siblings=siblings)
    layers = list(backend.prepare_tree(number, read_tree(chain, []), fan_out, depth, options))
    found = paths(layers) if layers else []
    assert len({tuple(path) for path in found}) == len(found)
    outcomes = layers[0].outcomes if layers else []
    assert outcomes == list(alone)
    for place, outcome in enumerate(outcomes):
        own = [path[1:] for path in found if path[0] == place]
        best = alone[outcome]  # another place may go on where the best one's text ends
        assert any(path[: len(best)] == best for path in own)
        assert 1 <= len(own) <= 1 + siblings
