"""The rejection rule gives exactly p: its randomness is integrated, not sampled.

Every choice is a step function of uniform numbers, so its distribution is a sum over the pieces.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from protocol.decoding.gumbel import ACCEPT, BONUS, DRAFT
from protocol.decoding.rejection import (
    Distribution,
    drafter_distribution,
    residual_distribution,
    verify_draft,
)
from protocol.decoding.sampler import Floats
from protocol.decoding.sampling_params import drafter_sampling
from protocol.errors import ProtocolError
from protocol.messages import DraftDistribution, Sampling, Verify
from protocol.transport.codec import Decoder, encode
from services.drafter.backends.base import DraftedToken, RoundOptions
from services.drafter.backends.growth import draft_tokens
from services.sampling.candidates import best_of
from tests.protocol.decoding.test_sampler import allowed, softmax
from tests.support.lookups import find_continuation

Doubles = npt.NDArray[np.float64]

SIZE = 5
FIRST = 40
"""The position of the first token that is looked at."""
PLAIN = Sampling(temperature=1.0, acceptance="rejection")


# ---------------------------------------------------------------- integration


class Dice:
    """Stands in for `noise.uniform`: the numbers are set by hand, one per stream and position."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], float] = {}

    def __call__(self, seed: int, stream: int, *counters: int) -> float:
        return self.numbers[stream, counters[-1]]


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> Dice:
    dice = Dice()
    monkeypatch.setattr("protocol.decoding.rejection.uniform", dice)
    return dice


def pieces(steps: Iterable[float]) -> Iterator[tuple[float, float]]:
    """(middle, length) of the pieces into which these steps cut the interval from 0 to 1."""
    inside = sorted({0.0, 1.0, *(float(step) for step in steps if 0.0 < step < 1.0)})
    for low, high in pairwise(inside):
        yield (low + high) / 2, high - low


def rolls(dice: Dice, steps: dict[tuple[int, int], Sequence[float]]) -> Iterator[float]:
    """Sets the dice to every combination of pieces; yields its probability."""
    for combination in product(*(pieces(dice) for dice in steps.values())):
        for key, (middle, _) in zip(steps, combination, strict=True):
            dice.numbers[key] = middle
        yield float(np.prod([length for _, length in combination]))


def steps_of(distribution: Doubles) -> list[float]:
    return [float(step) for step in np.cumsum(distribution)]


# ---------------------------------------------------------------- two models of five tokens


def truth(row: Floats, sampling: Sampling) -> Doubles:
    """p, by other means than those under test."""
    keep = allowed(row, sampling)
    distribution = np.zeros(SIZE)
    distribution[keep] = softmax(row[keep] / sampling.temperature)
    return distribution


@dataclass
class Case:
    """Parameters, and how the drafter's distribution is cut."""

    sampling: Sampling = PLAIN
    width: int = SIZE
    """How many of its best tokens the drafter draws from (N)."""
    held_back: int = 2
    models: list[tuple[Floats, Floats]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for seed in range(4):
            random = np.random.default_rng(seed)
            target, other = random.normal(size=(2, 1 + SIZE, SIZE)).astype(np.float32) * 1.5
            self.models.append((target, (target + other) / 2))

    def draft(self, row: Floats, position: int) -> DraftedToken:
        """What a drafter draws after these logits, as the verifier receives it."""
        top = best_of(row[None], self.width, None)
        [draft] = draft_tokens(
            top, [position], drafter_sampling(self.sampling), RoundOptions(3, self.held_back)
        )
        sent = Verify(
            sequence=1,
            round=1,
            position=1,
            nodes=[0, draft.token],
            distributions=[draft.distribution],
        )
        decoder: Decoder[Verify] = Decoder(Verify)
        [distribution] = decoder.decode(encode(sent)).distributions
        return DraftedToken(draft.token, draft.confidence, distribution)

    def drawn_from(self, row: Floats) -> Doubles:
        """q, by other means than those under test."""
        sampling = drafter_sampling(self.sampling)
        best = np.argsort(-row)[: self.width]
        cut = np.full(SIZE, -np.inf, np.float32)
        cut[best] = row[best]
        distribution = truth(cut, sampling)
        held = distribution.copy()
        held[best[: self.held_back]] *= sampling.saguaro
        return held / held.sum() if held.sum() else distribution


def changed(**changes: Any) -> Sampling:
    return msgspec.structs.replace(PLAIN, **changes)


CASES = {
    "same distribution": Case(),
    "cold": Case(changed(temperature=0.4)),
    "target filtered": Case(changed(top_k=3, draft_top_p=1.0)),
    "both filtered": Case(changed(min_p=0.1, top_p=0.9)),
    "hot draft": Case(changed(draft_temperature=3.0)),
    "draft filtered": Case(changed(draft_top_p=0.5)),
    "best two": Case(width=2),
    "best one": Case(width=1),
    "saguaro .4": Case(changed(saguaro=0.4)),
    "saguaro .1": Case(changed(saguaro=0.1)),
    "saguaro .1 of the best three, cold": Case(changed(saguaro=0.1, temperature=0.6), width=3),
    "saguaro 0": Case(changed(saguaro=0.0)),
    "saguaro 0 of all": Case(changed(saguaro=0.0), held_back=SIZE),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def rest_of(p: Doubles, q: Doubles) -> Doubles:
    rest = np.maximum(p - q, 0.0)
    return rest / rest.sum() if rest.sum() > 0 else p


def assert_same(expected: dict[Any, float], actual: dict[Any, float]) -> None:
    assert sum(actual.values()) == pytest.approx(1.0)
    for key in {*expected, *actual}:
        assert actual.get(key, 0.0) == pytest.approx(expected.get(key, 0.0), abs=1e-7), key


def summed(rolled: Iterable[tuple[float, Hashable]]) -> dict[Any, float]:
    joint: dict[Any, float] = defaultdict(float)
    for share, result in rolled:
        joint[result] += share
    return joint


def judged(
    target: Floats, token: int, distributions: list[DraftDistribution], sampling: Sampling
) -> list[int]:
    """What a round with this draft token commits."""
    accepted, bonus = verify_draft(target[[0, 1 + token]], [token], distributions, FIRST, sampling)
    return [token, bonus] if accepted else [bonus]


def committed(case: Case, target: Floats, row: Floats) -> list[int]:
    """What a round commits whose draft is drawn from these logits."""
    draft = case.draft(row, FIRST)
    return judged(target, draft.token, [draft.distribution], case.sampling)


def two_tokens(case: Case, target: Floats, row: Floats) -> tuple[int, int]:
    """The first two tokens; the second is decoded plainly after a rejection, as on a miss."""
    tokens = committed(case, target, row)
    if len(tokens) == 1:
        none, bonus = verify_draft(target[[1 + tokens[0]]], [], [], FIRST + 1, case.sampling)
        assert none == 0
        tokens.append(bonus)
    return tokens[0], tokens[1]


@cases
def test_a_drawn_draft_leaves_the_law_alone(dice: Dice, case: Case) -> None:
    """One draft token: what is committed at its position has exactly the distribution p."""
    for target, draft in case.models:
        p, q = truth(target[0], case.sampling), case.drawn_from(draft[0])
        # The draft's distribution in the order in which it is sent: falling logits.
        steps = {
            (DRAFT, FIRST): steps_of(q[np.argsort(-draft[0])]),
            (ACCEPT, FIRST): [a / b for a, b in zip(p, q, strict=True) if b > 0.0],
            (BONUS, FIRST): [
                *steps_of(rest_of(p, q)[_order(target[0], case)]),
                *steps_of(p[_order(target[0], case)]),
            ],
            (BONUS, FIRST + 1): [],
        }
        rolled = ((share, committed(case, target, draft[0])[0]) for share in rolls(dice, steps))
        assert_same(dict(enumerate(p)), summed(rolled))


def _order(row: Floats, case: Case) -> Any:
    """The order in which a target's distribution lists its tokens: falling if filtered."""
    filtered = not allowed(row, case.sampling).all() or case.sampling.min_p or case.sampling.top_k
    return np.argsort(-row) if filtered or case.sampling.top_p < 1.0 else np.arange(SIZE)


@pytest.mark.parametrize("name", ["same distribution", "best two", "saguaro .4", "saguaro .1"])
def test_two_tokens_have_their_joint_distribution(dice: Dice, name: str) -> None:
    """A hit row, its bonus token, and after a rejection a miss row: p of both, jointly."""
    case = CASES[name]
    for target, draft in case.models[:2]:
        p, q = truth(target[0], case.sampling), case.drawn_from(draft[0])
        after = [truth(row, case.sampling) for row in target[1:]]
        steps = {
            (DRAFT, FIRST): steps_of(q[np.argsort(-draft[0])]),
            (ACCEPT, FIRST): [a / b for a, b in zip(p, q, strict=True) if b > 0.0],
            (BONUS, FIRST): steps_of(rest_of(p, q)),
            (BONUS, FIRST + 1): [step for distribution in after for step in steps_of(distribution)],
        }
        rolled = ((share, two_tokens(case, target, draft[0])) for share in rolls(dice, steps))
        expected = {(a, b): p[a] * after[a][b] for a in range(SIZE) for b in range(SIZE)}
        assert_same(expected, summed(rolled))


@pytest.mark.parametrize("sampling", [PLAIN, changed(temperature=0.5), changed(top_k=2)], ids=str)
@pytest.mark.parametrize("named", range(SIZE))
def test_a_named_draft_leaves_the_law_alone(dice: Dice, named: int, sampling: Sampling) -> None:
    """A token that was not drawn stands with probability p; the rest is p without it."""
    case = Case(sampling)
    for target, _ in case.models:
        p = truth(target[0], sampling)
        q = np.eye(SIZE)[named]
        order = _order(target[0], case)
        steps = {
            (ACCEPT, FIRST): [p[named]],
            (BONUS, FIRST): steps_of(rest_of(p, q)[order]),
            (BONUS, FIRST + 1): [],
        }
        rolled = ((share, judged(target, named, [], sampling)[0]) for share in rolls(dice, steps))
        assert_same(dict(enumerate(p)), summed(rolled))


@pytest.mark.parametrize("said", [[3, 1, 0, 2, 3, 1], [4, 2, 2, 2, 4, 2], [0, 1, 2, 0, 1]], ids=str)
def test_an_ngram_row_has_the_joint_distribution(dice: Dice, said: list[int]) -> None:
    """What lookup finds in the prompt is verified as a chain: p of the first two tokens, jointly.

    Where the chain breaks, the next token is decoded plainly.
    """
    looked_up, _ = find_continuation(said, 2)
    assert len(looked_up) == 2
    for target, _ in Case().models:
        p = truth(target[0], PLAIN)
        after = [truth(row, PLAIN) for row in target[1:]]
        first, second = looked_up

        def round_of(target: Floats = target) -> tuple[int, int]:
            rows = target[[0, *(1 + token for token in looked_up)]]
            accepted, bonus = verify_draft(rows, looked_up, [], FIRST, PLAIN)
            tokens = [*looked_up[:accepted], bonus]
            if len(tokens) == 1:
                tokens.append(verify_draft(target[[1 + bonus]], [], [], FIRST + 1, PLAIN)[1])
            return tokens[0], tokens[1]

        steps = {
            (ACCEPT, FIRST): [p[first]],
            (BONUS, FIRST): steps_of(rest_of(p, np.eye(SIZE)[first])),
            (ACCEPT, FIRST + 1): [after[first][second]],
            (BONUS, FIRST + 1): [
                *steps_of(rest_of(after[first], np.eye(SIZE)[second])),
                *(step for distribution in after for step in steps_of(distribution)),
            ],
            (BONUS, FIRST + 2): [],
        }
        rolled = ((share, round_of()) for share in rolls(dice, steps))
        expected = {(a, b): p[a] * after[a][b] for a in range(SIZE) for b in range(SIZE)}
        assert_same(expected, summed(rolled))


def test_a_drafter_with_the_targets_law_is_always_accepted(dice: Dice) -> None:
    """min(1, p / q) is 1 where the distributions are the same, whatever was drawn."""
    case = CASES["same distribution"]
    for (target, _), number in product(case.models, [0.01, 0.3, 0.7, 0.99]):
        dice.numbers = {(DRAFT, FIRST): number, (ACCEPT, FIRST): 0.999, (BONUS, FIRST + 1): 0.5}
        draft = case.draft(target[0], FIRST)
        rows = target[[0, 1 + draft.token]]
        assert verify_draft(rows, [draft.token], [draft.distribution], FIRST, PLAIN)[0] == 1


@cases
def test_the_law_that_is_sent_is_the_law_that_is_drawn_from(dice: Dice, case: Case) -> None:
    """Tokens come as often as the distribution that travels with them says, Saguaro included."""
    for _, draft in case.models:
        expected = case.drawn_from(draft[0])
        steps = {(DRAFT, FIRST): steps_of(expected[np.argsort(-draft[0])])}
        joint: dict[int, float] = defaultdict(float)
        for share in rolls(dice, steps):
            token, confidence, distribution = case.draft(draft[0], FIRST)
            sent = dict(zip(distribution.tokens, distribution.probabilities, strict=True))
            assert confidence == max(distribution.probabilities)
            joint[token] += share
        assert_same(sent, joint)
        assert_same(dict(enumerate(expected)), joint)


@pytest.mark.parametrize("weight", [0.6, 0.2, 0.0])
def test_saguaro_moves_the_residual_to_what_is_prepared(weight: float) -> None:
    """The smaller C, the likelier a rejected round's bonus token is among the best of the draft."""
    for target, draft in Case().models:
        ids = np.argsort(-draft[0])
        p = Distribution(np.arange(SIZE), truth(target[0], PLAIN))

        def prepared(
            c: float, ids: Any = ids, p: Distribution = p, row: Floats = draft[0]
        ) -> float:
            q = drafter_distribution(ids, row[ids], changed(saguaro=c), 2)
            return sum(residual_distribution(p, q).of(int(token)) for token in ids[:2])

        assert prepared(weight) >= prepared(1.0) - 1e-12


@pytest.mark.parametrize(
    "distribution",
    [
        DraftDistribution([1, 2], [0.5]),
        DraftDistribution([1, 1], [0.5, 0.5]),
        DraftDistribution([1, 2], [0.9, 0.9]),
        DraftDistribution([1, 2], [0.1, 0.1]),
        DraftDistribution([2, 3], [0.5, 0.5]),
        DraftDistribution([1, 2], [0.0, 1.0]),
        DraftDistribution([], [1.0]),
    ],
    ids=str,
)
def test_a_law_that_cannot_be_is_refused(distribution: DraftDistribution) -> None:
    """Uneven, doubled, not summing to 1, or without the token: a ProtocolError names the token."""
    rows = np.zeros((2, SIZE), np.float32)
    with pytest.raises(ProtocolError, match="token 1 "):
        verify_draft(rows, [1], [distribution], FIRST, PLAIN)
