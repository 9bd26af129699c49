"""Trees of drafts: what is judged together is what each path is judged to be alone."""

import sys
from collections import Counter
from functools import cache
from itertools import count, product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.decoding.sampler import Floats, sample
from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.errors import ProtocolError
from protocol.messages import (
    CloseSequence,
    LogitsOptions,
    OpenSequence,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.verifier.acceptance import AcceptanceRule
from services.verifier.verifier import Verifier
from tests.properties import examples
from tests.support.chi_square import assert_law
from tests.support.reference import SAMPLINGS, for_the_cpu, plain, said, tiny_verifier
from tests.support.tiny_models import FAMILIES, RECURRENT

TREED = tuple(name for name in FAMILIES if name not in (*RECURRENT, "dynamic"))
"""Families whose targets judge trees: each token needs a position of its own."""
LENGTH = 33
PROMPTS = (
    (0, 2, 97, 41, 250, 33, 8, 141, 77, 19, 203, 64, 5, 120, 31, 88, 160, 3),
    (11, 200),
    (5, 4, 3, 2, 9, 9, 9),
)
NUMBERS = count(1)


@cache
def verifier_of(family: str) -> Verifier:
    return tiny_verifier(family)


Shape = list[tuple[int, int]]
"""Of each draft token: which earlier row it follows, and how far it is from the right token."""

shapes: st.SearchStrategy[Shape] = st.lists(
    st.tuples(st.integers(0, 11), st.sampled_from([0, 0, 1, 2])), max_size=12
)


def grow(pending: int, rest: Tokens, shape: Shape) -> TokenTree:
    """A tree of a random form; where a path is right so far, offset 0 is the right token."""
    tree = read_tree([pending], [])
    for place, offset in shape:
        parent = place % len(tree)
        depth = tree.depths[parent]
        token = (rest[min(depth, len(rest) - 1)] + offset) % 288
        if token not in tree.children[parent]:
            tree = TokenTree([*tree.tokens, token], [*tree.parents, parent])
    return read_tree(tree.tokens, tree.parents)


class Stream:
    """One open sequence and the tokens that plain decoding has for it."""

    def __init__(
        self,
        family: str,
        prompt: tuple[int, ...],
        sampling: Sampling,
        rest: Tokens | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        self.verifier = verifier if verifier is not None else verifier_of(family)
        self.number = next(NUMBERS)
        self.committed = list(prompt)
        self.rest = list(rest if rest is not None else plain(family, prompt, LENGTH, sampling))
        opened = OpenSequence(sequence=self.number, tokens=list(prompt[:-1]), sampling=sampling)
        said(self.verifier.handle(opened))

    def ask(self, tree: TokenTree) -> Verify:
        return Verify(
            sequence=self.number,
            round=len(self.committed),
            position=len(self.committed) - 1,
            nodes=tree.tokens,
            parents=tree.sent_parents,
        )

    def verify(self, tree: TokenTree) -> VerificationOutcome:
        outcome = list(self.verifier.handle(self.ask(tree)))[-1]
        assert isinstance(outcome, VerificationOutcome)
        return outcome

    def check(self, tree: TokenTree, outcome: VerificationOutcome) -> None:
        """The longest right path stands, and the right token follows it."""
        rows = [0]
        while (row := tree.children[rows[-1]].get(self.rest[len(rows) - 1])) is not None:
            rows.append(row)
        accepted = len(rows) - 1
        assert (accepted, self.rest[accepted]) == (outcome.accepted, outcome.bonus)
        assert outcome.node == (None if tree.is_chain else rows[-1])
        self.committed += self.rest[: accepted + 1]
        self.rest = self.rest[accepted + 1 :]

    def verify_all(self, shapes: list[Shape]) -> None:
        """Trees of these shapes, as long as the text goes on."""
        for shape in shapes:
            if len(self.rest) < 14:
                break
            tree = grow(self.committed[-1], self.rest, shape)
            self.check(tree, self.verify(tree))

    def play(self, shapes: list[Shape]) -> None:
        self.verify_all(shapes)
        while len(self.rest) > 1:  # what is in the KV now is what plain decoding has there
            chain = read_tree([self.committed[-1]], [])
            self.check(chain, self.verify(chain))
        self.close()

    def close(self) -> None:
        said(self.verifier.handle(CloseSequence(sequence=self.number)))


FORKED: list[Shape] = [
    [(0, 1), (0, 0), (2, 1), (2, 0), (4, 0)],
    [(0, 2), (0, 1), (1, 0), (2, 0)],
    [(0, 1), (0, 0), (1, 0), (2, 1), (2, 0), (5, 2), (5, 0), (7, 0)],
    [(0, 0), (1, 1), (1, 2), (1, 0)],
]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", TREED)
def test_trees_commit_the_tokens_of_plain_decoding(family: str, sampling: Sampling) -> None:
    """Right paths behind wrong siblings stand, and their keys and values move together.

    The sequence grows to several times the sliding window.
    """
    assert verifier_of(family).takes_trees
    Stream(family, PROMPTS[0], sampling).play(FORKED)


@examples(20)
@given(
    wanted=st.lists(shapes, min_size=1, max_size=6),
    family=st.sampled_from(["llama", "sliding", "gemma2", "gemma3", "qwen3", "yarn", "gemma4"]),
    prompt=st.sampled_from(PROMPTS),
    sampling=st.sampled_from([*SAMPLINGS.values(), Sampling(temperature=0.7, seed=3)]),
)
def test_random_trees_commit_the_tokens_of_plain_decoding(
    wanted: list[Shape], family: str, prompt: tuple[int, ...], sampling: Sampling
) -> None:
    """So do random trees, in layers of every kind that takes them."""
    Stream(family, prompt, sampling).play(wanted)


def rows_of(family: str, tree: TokenTree) -> Floats:
    """[rows, vocabulary] logits of a tree behind the longest prompt, in one pass."""
    verifier = verifier_of(family)
    state = verifier.new_state()
    state.append(len(PROMPTS[0]), whole=True)
    verifier._model(mx.array([PROMPTS[0]]), cache=state.caches)
    state.commit(len(PROMPTS[0]))
    if tree.is_chain:
        state.append(len(tree))
    else:
        state.append_tree(tree)
    return np.array(verifier._model(mx.array([tree.tokens]), cache=state.caches)[0])


@for_the_cpu
@pytest.mark.skipif(sys.platform != "linux", reason="macOS has MLX's Metal kernels")
@pytest.mark.parametrize("family", ["llama", "llama3", "qwen3", "sliding", "gemma3", "moe"])
def test_a_row_is_the_same_bits_in_a_tree(family: str) -> None:
    """As at the end of a chain, and as alone: the CPU's kernels sum in one order."""
    tree = read_tree([9, 5, 6, 7, 8, 5, 4, 3, 10, 7, 2, 1], [0, 0, 1, 1, 2, 3, 6, 0, 8, 9, 9])
    together = rows_of(family, tree)
    for row in range(len(tree)):
        chain = tree.keep(tree.path(row))
        np.testing.assert_array_equal(rows_of(family, chain)[-1], together[row])
        if len(chain) == 1:
            continue
        fork = read_tree([*chain.tokens, 255], [*chain.parents, 0])  # a row more, and a mask
        np.testing.assert_array_equal(rows_of(family, fork)[len(chain) - 1], together[row])


SHAPED = (
    LogitsOptions(repetition_penalty=1.6, presence_penalty=1.0, frequency_penalty=0.5),
    LogitsOptions(logit_bias=((65, 4.0), (66, -100.0)), frequency_penalty=1.5),
    LogitsOptions(grammar="start: /([a-h]+ )*(the|fox|dog)[a-z ]*/"),
)


def alone(
    family: str, prompt: Tokens, sampling: Sampling, length: int
) -> list[VerificationOutcome]:
    """Token by token, as plain decoding is."""
    stream = Stream(family, tuple(prompt), sampling, [0] * length)
    found = []
    for _ in range(length):
        found.append(stream.verify(read_tree([stream.committed[-1]], [])))
        stream.committed.append(found[-1].bonus)
    stream.close()
    return found


@examples(15)
@given(
    wanted=st.lists(shapes, min_size=1, max_size=4),
    options=st.sampled_from(SHAPED),
    temperature=st.sampled_from([0.0, 0.7]),
    family=st.sampled_from(["llama", "gemma3"]),
)
def test_penalties_grammar_and_logprobs_follow_the_path(
    wanted: list[Shape], options: LogitsOptions, temperature: float, family: str
) -> None:
    """Each row's logits are shaped by its own path: tokens and logprobs of one row a pass."""
    prompt = PROMPTS[0]
    options = replace(options, answer_from=len(prompt), stop_ids=(1,))
    sampling = Sampling(temperature=temperature, seed=4, logits_options=options, logprobs=2)
    expected = alone(family, list(prompt), sampling, 24)
    stream = Stream(family, prompt, sampling, [one.bonus for one in expected])
    for shape in wanted:
        if len(stream.rest) < 14:
            break
        tree = grow(stream.committed[-1], stream.rest, shape)
        outcome = stream.verify(tree)
        first = len(stream.committed) - len(prompt)
        stream.check(tree, outcome)
        for said_, own in zip(outcome.logprobs, expected[first:], strict=False):
            assert said_.chosen == pytest.approx(own.logprobs[0].chosen, abs=1e-3)
            assert [t for t, _ in said_.best] == [t for t, _ in own.logprobs[0].best]
        assert len(outcome.logprobs) == outcome.accepted + 1
    stream.close()


@pytest.mark.parametrize("family", ["llama", "sliding", "gemma2", "gemma3", "moe"])
def test_a_shared_pass_holds_several_trees(family: str) -> None:
    """Trees and chains of several sequences in one pass change no token."""
    laws = [*SAMPLINGS.values()]
    streams = [Stream(family, prompt, law) for prompt, law in zip(PROMPTS, laws, strict=True)]
    for turn in range(3):
        trees = [
            grow(stream.committed[-1], stream.rest, FORKED[turn + place] if place < 2 else [(0, 0)])
            for place, stream in enumerate(streams)
        ]
        work = [
            stream.verifier.handle(stream.ask(tree))
            for stream, tree in zip(streams, trees, strict=True)
        ]
        assert [next(answers) for answers in work] == [None] * 3
        for stream, tree, answers in zip(streams, trees, work, strict=True):
            [outcome] = said(answers)
            assert isinstance(outcome, VerificationOutcome)
            stream.check(tree, outcome)
    for stream in streams:
        stream.play([])


@pytest.mark.parametrize(
    ("nodes", "parents", "why"),
    [
        ([1, 2, 3], [0, 2], "row 2 of a tree cannot follow row 2"),
        ([1, 2, 3], [2, 0], "row 1 of a tree cannot follow row 2"),
        ([1, 2, 3], [0], "1 parents for 2 draft tokens"),
        ([1, 2, 2], [0, 0], "siblings"),
        ([1, *range(65)], [0] * 65, "cannot verify"),
    ],
)
def test_a_malformed_tree_changes_nothing(nodes: Tokens, parents: list[int], why: str) -> None:
    """It is refused, and the next tree is judged as ever."""
    stream = Stream("llama", PROMPTS[0], Sampling())
    with pytest.raises(ProtocolError, match=why):
        list(
            stream.verifier.handle(
                replace(
                    stream.ask(read_tree([1], [])),
                    nodes=[stream.committed[-1], *nodes[1:]],
                    parents=parents,
                )
            )
        )
    stream.play(FORKED)


@pytest.mark.parametrize("family", [*RECURRENT, "dynamic"])
def test_recurrent_targets_take_chains_only(family: str) -> None:
    """They say so, refuse a tree, and go on."""
    stream = Stream(family, PROMPTS[0], Sampling())
    assert not stream.verifier.takes_trees
    with pytest.raises(ProtocolError, match="chains, no trees"):
        stream.verify(read_tree([stream.committed[-1], 1, 2], [0, 0]))
    stream.play([])


def test_the_rejection_rule_judges_chains_only() -> None:
    """A tree is refused under it."""
    stream = Stream("llama", PROMPTS[0], Sampling(temperature=1.0, acceptance="rejection"), [0])
    with pytest.raises(ProtocolError, match="takes chains"):
        stream.verify(read_tree([stream.committed[-1], 1, 2], [0, 0]))
    assert stream.verify(read_tree([stream.committed[-1], 1], [])).node is None
    stream.close()


def test_a_sequence_in_the_middle_of_a_tree_keeps_what_is_sure() -> None:
    """Whoever asks for its tokens again gets the state from before the tree."""
    stream = Stream("gemma3", PROMPTS[0], Sampling())
    other = Stream("gemma3", PROMPTS[1], Sampling())
    tree = grow(stream.committed[-1], stream.rest, FORKED[0])
    work = stream.verifier.handle(stream.ask(tree))
    assert next(work) is None
    beside = stream.verifier.handle(other.ask(read_tree([other.committed[-1]], [])))
    said(beside)  # its pass takes the tree along
    work.close()
    stream.close()
    again = Stream("gemma3", PROMPTS[0], Sampling())
    again.play(FORKED)
    other.close()


# ------------------------------------------------------------ the law, by enumeration

SMALL = 4
"""Tokens of the vocabulary."""
LOGITS = np.random.default_rng(5).normal(size=(SMALL + 1, SMALL)).astype(np.float32)
"""[last token, vocabulary]: a target that knows the last token alone."""
FULL = read_tree(
    [0, 0, 1, 2, 3, *range(SMALL), *range(SMALL), *range(SMALL)],
    [0, 0, 0, 0, *[1] * SMALL, *[2] * SMALL, *[3] * SMALL],
)
"""All tokens at depth 1, and all behind three of them."""


def judge(tree: TokenTree, sampling: Sampling) -> Tokens:
    """What one verification emits."""
    opened = OpenSequence(sequence=1, tokens=[7], sampling=sampling)
    rule = AcceptanceRule(opened, Path())
    message = Verify(sequence=1, round=1, position=1, nodes=tree.tokens, parents=tree.sent_parents)
    logits = mx.array(LOGITS[tree.tokens])
    judged = rule.accept(logits, message, tree, rule.begin(logits, message, tree))
    return [*(tree.tokens[row] for row in judged.rows[1:]), judged.bonus]


def decode(length: int, sampling: Sampling) -> Tokens:
    """What plain decoding says."""
    tokens = [0]
    for position in range(length):
        tokens += sample(LOGITS[tokens[-1:]], [2 + position], sampling)
    return tokens[1:]


@pytest.mark.parametrize("tree", [FULL, FULL.keep([0, 2, 3, 9, 11]), FULL.keep([0])])
def test_sampled_trees_have_the_targets_law(tree: TokenTree) -> None:
    """For each seed the tokens of plain decoding; over the seeds, p of each pair of tokens."""
    pairs: Counter[int] = Counter()
    for seed in range(1000):
        sampling = Sampling(temperature=0.9, seed=seed)
        emitted = judge(tree, sampling)
        assert emitted == decode(len(emitted), sampling)
        pairs[emitted[0]] += 1
    shares = np.exp(LOGITS[0].astype(np.float64) / 0.9)
    assert_law(pairs, dict(enumerate((shares / shares.sum()).tolist())))


def test_every_small_tree_emits_a_beginning_of_plain_decoding() -> None:
    """All trees of three draft tokens over two tokens, for many seeds."""
    trees = []
    for parents in product([0], [0, 1], [0, 1, 2]):
        for tokens in product(range(2), repeat=3):
            try:
                trees.append(read_tree([0, *tokens], list(parents)))
            except ProtocolError:
                continue  # two siblings are alike
    assert len(trees) > 20
    for tree, seed in product(trees, range(40)):
        sampling = Sampling(temperature=0.9, seed=seed)
        emitted = judge(tree, sampling)
        assert emitted == decode(len(emitted), sampling)
        told = decode(4, sampling)
        node = tree.find(emitted[:-1])
        assert told[len(emitted) - 1] not in tree.children[node]
