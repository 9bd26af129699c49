"""Block heads with siblings, and for outcomes of trees: each token is what plain numpy names."""

from typing import Any

import numpy as np
import pytest

from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.messages import END_OF_BRANCH, LogitsOptions, Sampling, Tokens
from services.drafter.backends.base import DraftedToken, Outcome, RoundOptions, TreeLayer
from services.drafter.backends.head.branches import rate
from tests.services.drafter.backends.head.test_blocks import (
    PROMPT,
    VARIANTS,
    Case,
    opened,
    write_case,
)
from tests.services.drafter.backends.test_mlx import Law
from tests.services.drafter.backends.test_mlx_trees import FIRST, OPTIONS, Grown, next_tree
from tests.support.reading import CHAIN, grow
from tests.support.reference import SAMPLINGS, drafts, said

LAGS = [0, 2, 1]
"""Tokens without states at the end of what is committed, round by round."""


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return write_case(tmp_path_factory.mktemp("heads"), request.param)


class Line:
    """One sequence whose rounds verify trees, at a head that drafts blocks."""

    def __init__(self, case: Case, sampling: Sampling) -> None:
        self.case, self.sampling = case, sampling
        self.backend: Any = opened(case, PROMPT, sampling)
        self.committed, self.base = list(PROMPT), len(PROMPT)

    def advance(self, lag: int) -> range:
        """Commit, and read all states but the last ones; returns whose states there are."""
        self.backend.commit(1, self.base, self.committed[self.base :])
        stop = len(self.committed) - lag
        self.backend.read(1, 0, self.case.sent(0, stop))
        self.base = len(self.committed)
        return range(stop)

    def law(self, tokens: Tokens, known: range, drafted: int) -> Law:
        """What may follow these tokens, the last `drafted` of which the head drafted itself."""
        whole = self.committed + tokens
        hidden = self.case.slot(whole, known, drafted)
        scores = self.case.reference.scores(hidden, whole[-1]).astype(np.float32)
        return Law.of(scores, len(whole), self.sampling, None)

    def check(self, grown: Grown, layer: TreeLayer, starts: list[Tokens], known: range) -> None:
        """The candidates behind each token are the best ones, in order, with their shares."""
        for siblings in grown.add(layer):
            root, *before = siblings[0][:-1]
            law = self.law([*starts[root], *before], known, len(before))
            law.check_best([path[-1] for path in siblings])
            named = [grown.paths[path] for path in siblings]
            shares = [float(law.probabilities[path[-1]]) for path in siblings]
            if not self.case.shift:
                np.testing.assert_allclose(named, shares, atol=1e-4)
                continue
            # DSpark says itself how sure it is of the best.
            hidden = self.case.slot([*self.committed, *starts[root], *before], known, len(before))
            last = [*starts[root], *before][-1]
            assert named[0] == pytest.approx(self.case.reference.confidence(hidden, last), abs=1e-4)
            assert named == sorted(named, reverse=True)

    def prepare(self, tree: TokenTree, fan_out: list[int], depth: int, lag: int) -> Grown:
        """Prepare, and check every candidate and every drafted token."""
        known = self.advance(lag)
        grown = Grown()
        layers = said(self.backend.prepare(1, tree, fan_out, depth, OPTIONS))
        starts = [[*tree.tokens_to(o.accepted), o.bonus] for o in layers[0].outcomes]
        for layer in layers:
            assert END_OF_BRANCH not in layer.tokens
            self.check(grown, layer, starts, known)
        for row, wanted in enumerate(fan_out):
            bonuses = [o.bonus for o in grown.outcomes if o.accepted == row]
            assert len(bonuses) == wanted
            law = self.law(tree.tokens_to(row), known, 0)
            scores = law.scores.copy()
            assert not set(bonuses) & set(tree.children[row])
            scores[list(tree.children[row])] = -1e9
            best = sorted(scores, reverse=True)[:wanted]
            assert [float(scores[t]) for t in bonuses] == pytest.approx(best, abs=1e-3)
        assert all(len(layer.tokens) <= 3 * (len(grown.outcomes) + 3) for layer in layers)
        return grown


@pytest.mark.parametrize("law", SAMPLINGS)
def test_trees_are_those_of_the_reference(case: Case, law: str) -> None:
    """Outcomes at every row, siblings at every token, with states that lag; and again behind a
    path that stood."""
    line, tree = Line(case, SAMPLINGS[law]), FIRST
    assert line.backend.identity.takes_trees
    for turn, lag in enumerate(LAGS):
        fan_out = [1 + (row + turn) % 2 for row in range(len(tree))]
        grown = line.prepare(tree, fan_out, 2, lag)
        place = [5, 3, 0][turn] % len(grown.outcomes)
        outcome = grown.outcomes[place]
        line.committed += tree.tokens_to(outcome.accepted)
        tree = next_tree(grown, place, 6)


@pytest.mark.parametrize("law", SAMPLINGS)
def test_a_draft_that_is_waited_for_may_fork(case: Case, law: str) -> None:
    """Depth by depth what the reference names; its likeliest path is the plain draft."""
    line = Line(case, SAMPLINGS[law])
    known = line.advance(0)
    grown = Grown()
    layers = said(line.backend.draft(1, 120, 4, OPTIONS))
    for layer in layers:
        assert layer.outcomes == [Outcome(0, 120)]
        line.check(grown, layer, [[120]], known)
    assert len(grown.last) == 3  # siblings are leaves
    plain = [one.token for one in drafts(line.backend.draft(1, 120, 4))]
    assert [layer.tokens[0] for layer in layers] == plain


def test_a_draft_reads_the_output_head_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are computed for all slots that may be asked for, and for no others."""
    line = Line(case, Sampling())
    line.advance(0)
    rows: list[int] = []
    head = line.backend._head
    logits = type(head).logits

    def watched(self: Any, hidden: Any) -> Any:
        rows.append(hidden.shape[0])
        return logits(self, hidden)

    monkeypatch.setattr(type(head), "logits", watched)
    assert len(drafts(line.backend.draft(1, 120, 4))) == 4
    assert rows == [4]
    said(line.backend.prepare(1, read_tree(CHAIN), [1, 1, 1], 3))
    assert rows == [4, 3, 9]


def test_siblings_leave_the_branches_as_they_were(case: Case) -> None:
    """The likeliest path of every outcome is its branch without siblings."""
    line = Line(case, Sampling(temperature=0.7, seed=9))
    line.advance(0)
    chain = grow(line.backend)
    tree = read_tree(CHAIN, [])
    forked = said(line.backend.prepare(1, tree, [2] * len(CHAIN), 3, OPTIONS))
    assert [layer.outcomes for layer in forked] == [layer.outcomes for layer in chain]
    best = list(range(len(chain[0].outcomes)))
    for one, other in zip(forked, chain, strict=True):
        best = [one.parents.index(place) for place in best]
        assert [one.tokens[place] for place in best] == other.tokens


def test_branches_that_fill_their_blocks_end(case: Case) -> None:
    """With siblings, too: the others go on, and nothing is named behind those that ended."""
    line = Line(case, Sampling())
    line.advance(0)
    chain = [203, 64, 5, 9, 8, 7]
    layers = said(line.backend.prepare(1, read_tree(chain, []), [1] * 6, 8, OPTIONS))
    grown = Grown()
    for layer in layers:
        assert END_OF_BRANCH not in layer.tokens
        grown.add(layer)
    longest = {i: max(len(p) - 1 for p in grown.paths if p[0] == i) for i in range(6)}
    room = 8 - 2 + case.shift
    assert [longest[i] for i in range(6)] == [room - i for i in range(6)]


def test_bans_hold_along_every_path(case: Case) -> None:
    """A path that forks has its own penalties; what is banned is nowhere."""
    line = Line(case, Sampling())
    line.advance(0)
    tree = read_tree(CHAIN, [])
    [first, *_] = said(line.backend.prepare(1, tree, [1, 1, 1], 3, OPTIONS))
    banned = first.tokens[0]
    options = LogitsOptions(
        repetition_penalty=1.5, logit_bias=((banned, -1e9),), answer_from=len(PROMPT)
    )
    line = Line(case, Sampling(logits_options=options))
    line.advance(0)
    layers = said(line.backend.prepare(1, tree, [1, 1, 1], 3, OPTIONS))
    assert layers
    assert all(banned not in layer.tokens for layer in layers)


@pytest.mark.parametrize(
    ("sure", "expected"),
    [
        (0.8, [0.8, 0.15, 0.05]),
        (0.5, [0.5, 0.375, 0.125]),
        (0.1, [0.1, 0.1, 0.1]),
        (1.0, [1, 0, 0]),
    ],
)
def test_what_a_head_leaves_unsaid_goes_to_the_siblings(sure: float, expected: list[float]) -> None:
    """By their probabilities, and never more than to the best."""
    named = [DraftedToken(5, 0.6), DraftedToken(6, 0.3), DraftedToken(7, 0.1)]
    assert [one.confidence for one in rate(named, sure)] == pytest.approx(expected)
    assert [one.token for one in rate(named, sure)] == [5, 6, 7]
    assert [one.confidence for one in rate([DraftedToken(5, 1.0), *named[1:]], 0.4)][1:] == [0, 0]


def test_under_the_rejection_rule_nothing_forks(case: Case) -> None:
    """What is drawn has no siblings."""
    line = Line(case, Sampling(temperature=0.8, acceptance="rejection"))
    line.advance(0)
    tree = read_tree(CHAIN, [])
    for layer in said(line.backend.prepare(1, tree, [2, 2, 2], 3, RoundOptions(siblings=2))):
        assert layer.parents == []
        assert len(layer.tokens) == len(layer.distributions) == 6
