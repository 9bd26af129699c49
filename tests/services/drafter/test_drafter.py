"""The drafter service turns a backend's layers into DraftTrees, one per depth."""

from collections.abc import Generator
from itertools import islice, pairwise

import pytest
from msgspec.structs import replace

from protocol.decoding.token_tree import TokenTree
from protocol.errors import ProtocolError
from protocol.messages import (
    END_OF_BRANCH,
    CloseSequence,
    DraftDistribution,
    DraftNow,
    DraftTree,
    FromDrafter,
    OpenSequence,
    Prefilled,
    Prepare,
    Sampling,
    Tokens,
    Verify,
)
from protocol.transport.codec import Decoder, encode
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    BackendIdentity,
    DraftedToken,
    Outcome,
    RoundOptions,
    TreeLayer,
    to_layer,
)
from services.drafter.drafter import Drafter
from services.runtime.inbox import Work
from tests.services.drafter.lookup_backend import LookupBackend

NOT_DRAWN = DraftDistribution()
VOCABULARY, MOST = 50, 4
ROOTS = [Outcome(0, 5), Outcome(2, 6)]
OPEN = OpenSequence(sequence=3, tokens=[1, 2, 3], sampling=Sampling(temperature=0.5))
PREPARE = Prepare(sequence=3, round=9, base=2, tokens=[3, 4], nodes=[7, 8], fan_out=[1, 2], depth=3)
DRAFT = DraftNow(sequence=3, round=9, base=2, tokens=[3, 4], pending=7, accepted=1, count=3)


class FakeBackend:
    """Writes down what it is asked, and has so many layers and draft tokens."""

    def __init__(
        self, layers: int, drafts: int, distribution: DraftDistribution = NOT_DRAWN
    ) -> None:
        self.turns: list[RoundOptions] = []
        self._distribution = distribution
        self.asked: list[tuple[object, ...]] = []
        self._layers = layers
        self._drafts = drafts

    @property
    def identity(self) -> BackendIdentity:
        return BackendIdentity("fake", "", "", VOCABULARY, 0, "cpu", MOST)

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        self.asked.append(("opening", sequence, tokens, sampling))
        yield
        yield
        self.asked.append(("opened",))

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        self.asked.append(("commit", sequence, base, tokens))

    def prepare(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer]:
        self.turns.append(options)
        self.asked.append(("prepare", sequence, tree.tokens, fan_out, depth))
        for depth_ in range(min(depth, self._layers)):
            self.asked.append(("layer",))
            distributions = [self._distribution, NOT_DRAWN] if self._distribution.tokens else []
            yield TreeLayer(ROOTS, [10 + depth_, END_OF_BRANCH], [0.5, 0.0], distributions)

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer]:
        self.turns.append(options)
        self.asked.append(("draft", sequence, pending, count))
        for at in range(min(count, self._drafts)):
            yield to_layer(DraftedToken(20 + at, 0.25, self._distribution))

    def close(self, sequence: int) -> None:
        self.asked.append(("close", sequence))


def opened(backend: FakeBackend) -> Drafter:
    """A drafter that has the sequence open; what the backend was asked until then is forgotten."""
    drafter = Drafter(backend)
    list(drafter.handle(OPEN))
    backend.asked.clear()
    return drafter


def trees(
    message: Work, *, layers: int = 9, drafts: int = 9, distribution: DraftDistribution = NOT_DRAWN
) -> list[DraftTree]:
    answers = list(opened(FakeBackend(layers, drafts, distribution)).handle(message))
    assert all(isinstance(answer, DraftTree) for answer in answers)
    found = [answer for answer in answers if isinstance(answer, DraftTree)]
    assert {(3, 9)} >= {(tree.sequence, tree.round) for tree in found}
    assert [tree.depth for tree in found] == list(range(1, len(found) + 1))
    assert all(tree.draft_ms >= 0 for tree in found)
    for before, after in pairwise(found):  # one layer begins where the other ended
        assert after.at_ns - round(1e6 * after.draft_ms) == before.at_ns
    return found


def test_opening_replaces_and_prefills_to_the_end() -> None:
    """What was there is closed first; Prefilled comes when the backend is done."""
    backend = FakeBackend(0, 0)
    *_, answer = Drafter(backend).handle(OPEN)
    assert isinstance(answer, Prefilled)
    assert (answer.sequence, answer.length) == (3, 3)
    opening = ("opening", 3, [1, 2, 3], OPEN.sampling)
    assert backend.asked == [("close", 3), opening, ("opened",)]


@pytest.mark.parametrize("layers", [3, 9])
def test_every_depth_is_a_message(layers: int) -> None:
    """The outcomes come with the first depth, and the last one says that it is the last."""
    found = trees(PREPARE, layers=layers)
    assert [tree.outcomes for tree in found] == [[(0, 5), (2, 6)], [], []]
    assert [tree.tokens for tree in found] == [
        [10, END_OF_BRANCH],
        [11, END_OF_BRANCH],
        [12, END_OF_BRANCH],
    ]
    assert [tree.confidences for tree in found] == [[0.5, 0.0]] * 3
    assert [tree.last for tree in found] == [False, False, True]


def test_a_backend_is_told_the_round_and_what_to_hold_back() -> None:
    """What a draw depends on comes with every question."""
    backend = FakeBackend(1, 1)
    for message in (PREPARE, DRAFT):
        list(opened(backend).handle(replace(message, held_back=2)))
    assert backend.turns == [RoundOptions(9, 2), RoundOptions(9, 2)]


def test_laws_travel_with_their_tokens() -> None:
    """What a token was drawn from is sent with it, if it was drawn."""
    distribution = DraftDistribution([20, 30], [0.5, 0.5])
    for tree in (*trees(PREPARE), *trees(DRAFT)):
        assert tree.distributions == []
    drawn = trees(PREPARE, distribution=distribution) + trees(
        DRAFT, distribution=distribution, drafts=2
    )
    assert [tree.distributions for tree in drawn] == [
        *[[distribution, DraftDistribution()]] * 3,
        *[[distribution]] * 2,
        [],
    ]


def test_backends_may_do_less() -> None:
    """Fewer layers are fewer messages, none is none."""
    assert [tree.last for tree in trees(PREPARE, layers=2)] == [False, False]
    assert trees(PREPARE, layers=0) == []


def test_layers_are_made_one_by_one() -> None:
    """After the news is committed, each depth is computed only when it is asked for."""
    backend = FakeBackend(9, 9)
    answers = opened(backend).handle(PREPARE)
    assert backend.asked == []
    list(islice(answers, 2))
    answers.close()
    commit = ("commit", 3, 2, [3, 4])
    assert backend.asked == [commit, ("prepare", 3, [7, 8], [1, 2], 3), ("layer",), ("layer",)]


def test_a_draft_is_the_branch_of_its_pending_token() -> None:
    """DraftNow is answered by a single branch (accepted, pending), a message per token."""
    found = trees(DRAFT)
    assert [tree.outcomes for tree in found] == [[(1, 7)], [], []]
    assert [tree.tokens for tree in found] == [[20], [21], [22]]
    assert [tree.confidences for tree in found] == [[0.25]] * 3
    assert [tree.last for tree in found] == [False, False, True]


def test_a_short_draft_ends_in_ended() -> None:
    """The target waits, so it is told that nothing more will come, also if nothing came at all."""
    found = trees(DRAFT, drafts=1)
    assert [tree.tokens for tree in found] == [[20], [END_OF_BRANCH]]
    assert [tree.outcomes for tree in found] == [[(1, 7)], []]
    assert [tree.last for tree in found] == [False, True]
    [only] = trees(DRAFT, drafts=0)
    assert (only.tokens, only.outcomes, only.last) == ([END_OF_BRANCH], [(1, 7)], True)


def test_closing_is_handed_on() -> None:
    """A closed sequence is closed in the backend, without an answer."""
    backend = FakeBackend(0, 0)
    assert list(Drafter(backend).handle(CloseSequence(sequence=8))) == []
    assert backend.asked == [("close", 8)]


def test_what_is_not_for_a_drafter_is_refused() -> None:
    """A verifier's message is a ProtocolError that names it."""
    with pytest.raises(ProtocolError, match="a drafter cannot handle Verify"):
        list(Drafter(FakeBackend(0, 0)).handle(Verify(sequence=1, round=1, position=0, nodes=[1])))


def test_news_of_a_sequence_supersedes_its_older_work() -> None:
    """Any message of the same sequence does, but a prefill ends only with its sequence."""
    drafter = Drafter(FakeBackend(0, 0))
    close = CloseSequence(sequence=3)
    for current in (OPEN, PREPARE, DRAFT):
        for news in (OPEN, PREPARE, DRAFT, close):
            prepares = current is OPEN and news in (PREPARE, DRAFT)
            assert drafter.supersedes(news, current) is not prepares
        assert not drafter.supersedes(CloseSequence(sequence=4), current)
        assert not drafter.supersedes(current, close)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (PREPARE, "sequence 3 is not open"),
        (DRAFT, "sequence 3 is not open"),
        (replace(OPEN, tokens=[1, VOCABULARY]), "token 50 is not in the vocabulary of 50"),
        (replace(PREPARE, base=4), "cannot rewind 3 tokens to 4"),
        (replace(DRAFT, base=4), "cannot rewind 3 tokens to 4"),
        (replace(PREPARE, tokens=[VOCABULARY]), "token 50 is not in"),
        (replace(PREPARE, nodes=[1, 2**31 - 1]), "token 2147483647 is not in"),
        (replace(DRAFT, pending=VOCABULARY), "token 50 is not in"),
        (replace(PREPARE, nodes=[], fan_out=[]), "a chain of 0 tokens is not 1 to 5 long"),
        (replace(PREPARE, nodes=[1] * 6), "a chain of 6 tokens is not 1 to 5 long"),
        (replace(PREPARE, fan_out=[1] * 3), "a fan-out of 3 lengths does not fit a chain of 2"),
        (replace(PREPARE, fan_out=[1, 256]), "257 branches are more than 256"),
        (replace(PREPARE, parents=[1]), "row 1 of a tree cannot follow row 1"),
        (replace(PREPARE, parents=[0, 0]), "2 parents for 1 draft tokens"),
        (replace(PREPARE, nodes=[1, 2, 2], parents=[0, 0]), "siblings of a tree are the same"),
        (replace(PREPARE, nodes=[1, 2, 3], parents=[0, 0]), "chains, not for trees"),
    ],
)
def test_what_does_not_fit_the_sequence_never_reaches_the_backend(message: Work, why: str) -> None:
    """A host may say anything; what it says is compared with what is there."""
    backend = FakeBackend(9, 9)
    drafter = Drafter(backend) if "not open" in why else opened(backend)
    with pytest.raises(ProtocolError, match=why):
        list(drafter.handle(message))
    assert [call for call in backend.asked if call[0] != "close"] == []


def test_after_a_rewind_less_is_there() -> None:
    """What was cut off cannot be rewound to."""
    drafter = opened(FakeBackend(9, 9))
    list(drafter.handle(replace(PREPARE, base=1, tokens=[])))
    with pytest.raises(ProtocolError, match="cannot rewind 1 tokens to 2"):
        list(drafter.handle(PREPARE))


def test_a_backend_is_asked_for_no_more_than_it_can() -> None:
    """A host may ask for any depth."""
    backend = FakeBackend(9, 9)
    drafter = opened(backend)
    list(drafter.handle(replace(PREPARE, depth=10**9)))
    *_, end = drafter.handle(replace(DRAFT, count=10**9))
    assert [call[-1] for call in backend.asked if call[0] in ("prepare", "draft")] == [MOST, MOST]
    assert isinstance(end, DraftTree)
    assert (end.tokens, end.last) == ([END_OF_BRANCH], True)


@pytest.mark.parametrize("confidence", [-0.1, 1.0000001, float("nan"), float("inf"), 1e300])
def test_a_confidence_is_a_probability(confidence: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rounding and extreme logits make of it: others would take it for hostile."""
    layer = TreeLayer(ROOTS, [1, 2], [confidence, 0.5])
    monkeypatch.setattr(FakeBackend, "prepare", lambda *_: iter([layer]))
    monkeypatch.setattr(FakeBackend, "draft", lambda *_: iter([TreeLayer([], [1], [confidence])]))
    drafter = opened(FakeBackend(0, 0))
    for message in (PREPARE, DRAFT):
        for answer in drafter.handle(message):
            assert answer is not None
            assert Decoder[FromDrafter](FromDrafter).decode(encode(answer)) == answer


TEXT = [1, 2, 3, 4, 5, 9, 1, 2, 6, 7, 8, 9, 1, 2, 3, 3, 9, 1]


def told(message: Prepare | DraftNow) -> list[DraftTree]:
    """What a drafter answers that takes trees."""
    drafter = Drafter(LookupBackend())
    list(drafter.handle(OpenSequence(sequence=3, tokens=TEXT, sampling=Sampling())))
    answers = list(drafter.handle(replace(message, base=len(TEXT), tokens=[])))
    return [answer for answer in answers if isinstance(answer, DraftTree)]


def test_trees_are_answered_with_trees() -> None:
    """Layers come with the places of their parents; without siblings, with none."""
    now = replace(DRAFT, pending=2, accepted=4, count=3, siblings=1)
    found = told(now)
    assert [(tree.depth, tree.tokens, tree.parents, tree.last) for tree in found] == [
        (1, [3, 6], [0, 0], False),
        (2, [3, 7], [0, 1], False),
        (3, [9, 8], [0, 1], True),
    ]
    assert [tree.outcomes for tree in found] == [[(4, 2)], [], []]
    assert all(not tree.parents for tree in told(replace(now, siblings=0)))
    forked = replace(PREPARE, nodes=[2, 3, 6], parents=[0, 0], fan_out=[0, 0, 1], siblings=1)
    assert told(forked)[0].outcomes == [(2, 7)]


def test_a_tree_that_ends_early_says_so() -> None:
    """One end for each token of the last layer, and nothing after it."""
    *_, last = told(replace(DRAFT, pending=2, accepted=0, count=20, siblings=1))
    assert set(last.tokens) == {END_OF_BRANCH}
    assert (last.parents, last.last) == ([], True)
