"""Branches that fork, and outcomes of trees: each token is what fresh drafting would name there."""

from dataclasses import dataclass, field
from itertools import count, cycle

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.messages import Sampling, Tokens
from services.drafter.backends.base import Outcome, RoundOptions, TreeLayer
from tests.properties import examples
from tests.services.drafter.backends.test_mlx import PROMPT, Law, Setup, setup_of
from tests.support.reference import SAMPLINGS, said
from tests.support.tiny_models import DRAFTERS

NUMBERS = count(10_000)
OPTIONS = RoundOptions(siblings=2)


@dataclass
class Grown:
    """The branches of a round as paths, from their layers."""

    outcomes: list[Outcome] = field(default_factory=list)
    paths: dict[tuple[int, ...], float] = field(default_factory=dict)
    """(outcome's index, tokens...) -> confidence in the last of them."""
    last: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, layer: TreeLayer) -> list[list[tuple[int, ...]]]:
        """One depth; returns the paths of each parent's children."""
        before = self.last if self.outcomes else [(i,) for i in range(len(layer.outcomes))]
        self.outcomes = layer.outcomes
        parents = layer.parents or list(range(len(layer.tokens)))
        self.last = [(*before[p], t) for p, t in zip(parents, layer.tokens, strict=True)]
        assert len(set(self.last)) == len(self.last)
        self.paths |= dict(zip(self.last, layer.confidences, strict=True))
        groups: dict[int, list[tuple[int, ...]]] = {}
        for parent, path in zip(parents, self.last, strict=True):
            groups.setdefault(parent, []).append(path)
        return list(groups.values())


class Line:
    """One sequence whose rounds verify trees."""

    def __init__(self, setup: Setup, sampling: Sampling) -> None:
        self.setup, self.sampling = setup, sampling
        self.number = next(NUMBERS)
        self.committed, self.base = list(PROMPT), len(PROMPT)
        said(setup.backend.open(self.number, list(PROMPT), sampling))

    def laws(self, prefixes: list[Tokens]) -> list[Law]:
        """What fresh drafting says after each of these, behind the committed tokens."""
        whole = [self.committed + tokens for tokens in prefixes]
        return [laws[-1] for laws in self.setup.distributions(whole, self.sampling)]

    def commit(self) -> None:
        self.setup.backend.commit(self.number, self.base, self.committed[self.base :])
        self.base = len(self.committed)

    def prepare(self, tree: TokenTree, fan_out: list[int], depth: int) -> Grown:
        """Prepare, and check every candidate and every drafted token."""
        self.commit()
        grown = Grown()
        layers = said(self.setup.backend.prepare(self.number, tree, fan_out, depth, OPTIONS))
        assert len(layers) == (depth if any(fan_out) else 0)
        families = [siblings for layer in layers for siblings in grown.add(layer)]
        starts = [[*tree.tokens_to(o.accepted), o.bonus] for o in grown.outcomes]
        self.check(starts, families, grown.paths)
        laws = self.laws([tree.tokens_to(row) for row in range(len(tree))])
        for row, law in enumerate(laws if layers else []):
            bonuses = [o.bonus for o in grown.outcomes if o.accepted == row]
            assert len(bonuses) == fan_out[row]
            scores = law.scores.copy()
            assert not set(bonuses) & set(tree.children[row])
            scores[list(tree.children[row])] = -1e9
            best = sorted(scores, reverse=True)[: len(bonuses)]
            assert [float(scores[t]) for t in bonuses] == pytest.approx(best, abs=1e-3)
        assert all(len(layer.tokens) <= 3 * (len(layer.outcomes) + 3) for layer in layers)
        return grown

    def check(
        self,
        starts: list[Tokens],
        families: list[list[tuple[int, ...]]],
        confidences: dict[tuple[int, ...], float],
    ) -> None:
        """Each family is the best tokens behind its parent, in order, with their probabilities."""
        if not families:
            return
        laws = self.laws([[*starts[one[0][0]], *one[0][1:-1]] for one in families])
        for law, siblings in zip(laws, families, strict=True):
            law.check_best([path[-1] for path in siblings])
            for path in siblings:
                assert abs(confidences[path] - law.probabilities[path[-1]]) < 1e-4

    def go_on(self, tree: TokenTree, root: Outcome) -> None:
        """The verification ended so; the bonus token is pending."""
        self.committed += tree.tokens_to(root.accepted)


def next_tree(grown: Grown, outcome: int, most: int) -> TokenTree:
    """The branch of an outcome as the tree that is verified next, deepest paths first."""
    tokens, parents = [grown.outcomes[outcome].bonus], list[int]()
    rows = {(outcome,): 0}
    for path in sorted(p for p in grown.paths if p[0] == outcome)[:most]:
        if path[:-1] in rows:
            rows[path] = len(tokens)
            parents.append(rows[path[:-1]])
            tokens.append(path[-1])
    return read_tree(tokens, parents)


FIRST = read_tree([120, 7, 160, 31, 9, 8, 31, 2], [0, 1, 2, 1, 0, 5, 5])


CASES = list(zip(DRAFTERS, cycle(SAMPLINGS.values()), strict=False))


@pytest.mark.parametrize(("family", "sampling"), CASES, ids=DRAFTERS)
def test_trees_are_what_fresh_drafting_gives(family: str, sampling: Sampling) -> None:
    """Outcomes at every row, siblings at every token, and again behind a path that stood."""
    line, tree = Line(setup_of(family), sampling), FIRST
    assert line.setup.backend.identity.takes_trees
    for turn in range(3):
        fan_out = [1 + (row + turn) % 2 for row in range(len(tree))]
        grown = line.prepare(tree, fan_out, 3)
        place = [5, 3, 0][turn] % len(grown.outcomes)
        line.go_on(tree, grown.outcomes[place])
        tree = next_tree(grown, place, 9)
    line.setup.backend.close(line.number)


@examples(10, phases=(Phase.generate,))
@given(data=st.data())
def test_random_rounds_of_trees(data: st.DataObject) -> None:
    """Hits on any row, and trees of any part of the branch that was hit."""
    family = data.draw(st.sampled_from(["llama", "sliding", "gemma3", "qwen3"]))
    line = Line(setup_of(family), data.draw(st.sampled_from(list(SAMPLINGS.values()))))
    tree = FIRST
    for _ in range(4):
        fan_out = [data.draw(st.integers(0, 2)) for _ in range(len(tree))]
        grown = line.prepare(tree, fan_out, data.draw(st.integers(1, 4)))
        if not grown.outcomes:
            break
        place = data.draw(st.integers(0, len(grown.outcomes) - 1))
        line.go_on(tree, grown.outcomes[place])
        if data.draw(st.booleans()):
            tree = next_tree(grown, place, data.draw(st.integers(0, 10)))
        else:
            tree = read_tree([grown.outcomes[place].bonus, 5, 6], [0, 0])
    line.setup.backend.close(line.number)


def test_what_was_fed_behind_a_side_row_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Side rows that stand, and the branch behind them, are moved and not computed again."""
    line = Line(setup_of("llama"), Sampling())
    grown = line.prepare(FIRST, [1] * len(FIRST), 3)
    place = next(i for i, o in enumerate(grown.outcomes) if o.accepted == 6)
    line.go_on(FIRST, grown.outcomes[place])
    fed: list[Tokens] = []
    backend = line.setup.backend
    append = type(backend)._append

    def spy(self: object, known: object, tokens: Tokens, width: int) -> object:
        fed.append(tokens)
        return append(backend, known, tokens, width)  # type: ignore[arg-type]

    monkeypatch.setattr(type(backend), "_append", spy)
    best = min(p for p in grown.paths if p[0] == place and len(p) == 4)
    line.commit()
    chain = [grown.outcomes[place].bonus, *best[1:]]
    said(backend.prepare(line.number, read_tree(chain), [1] * len(chain), 1))
    assert fed == [chain[3:]]
    backend.close(line.number)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_draft_that_is_waited_for_may_fork(sampling: Sampling) -> None:
    """Depth by depth what fresh drafting names; the next round goes on from it."""
    line = Line(setup_of("llama"), sampling)
    grown = Grown()
    families: list[list[tuple[int, ...]]] = []
    for layer in said(line.setup.backend.draft(line.number, 120, 4, OPTIONS)):
        assert layer.outcomes == [Outcome(0, 120)]
        families += grown.add(layer)
    line.check([[120]], families, grown.paths)
    assert len(grown.last) == 3  # siblings are leaves
    tree = next_tree(grown, 0, 8)
    line.prepare(tree, [1] * len(tree), 2)
    line.setup.backend.close(line.number)


def test_without_siblings_branches_are_what_they_were() -> None:
    """A chain, no siblings: one token for each outcome, and no parents in any layer."""
    line = Line(setup_of("llama"), Sampling())
    layers = said(line.setup.backend.prepare(line.number, read_tree([120, 7, 160]), [2, 1, 2], 4))
    assert [len(layer.tokens) for layer in layers] == [5] * 4
    assert all(layer.parents == [] for layer in layers)
    line.setup.backend.close(line.number)


def test_under_the_rejection_rule_nothing_forks() -> None:
    """What is drawn has no siblings."""
    line = Line(setup_of("llama"), Sampling(temperature=0.8, acceptance="rejection"))
    tree = read_tree([120, 7], [])
    layers = said(line.setup.backend.prepare(line.number, tree, [2, 2], 3, OPTIONS))
    assert all(layer.parents == [] and len(layer.tokens) == 4 for layer in layers)
    assert all(len(layer.distributions) == 4 for layer in layers)
    line.setup.backend.close(line.number)
