"""What a foreign drafter sends as the distribution of its draft biases nothing.

Either it is one that the draft can have been drawn from, then the answer's distribution is
exactly the target's for whatever it is; or it is none, then the draft is not used at all.
"""

import tracemalloc
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from orchestrator.sequence.draft import Draft
from protocol.decoding.gumbel import ACCEPT, BONUS
from protocol.decoding.rejection import verify_draft
from protocol.errors import ProtocolError
from protocol.messages import DraftDistribution, DraftTree, Sampling
from protocol.transport.codec import Decoder, encode
from tests.protocol.decoding.test_sampler import softmax

SIZE = 5
SAMPLING = Sampling(temperature=1.0, acceptance="rejection")
LARGEST_ID = 2**31 - 1
ROWS = np.random.default_rng(4).normal(size=(3, 2, SIZE)).astype(np.float32) * 1.5
NAN, INFINITY = float("nan"), float("inf")

POSSIBLE = {
    "the whole vocabulary": ([0, 1, 2, 3, 4], [0.1, 0.2, 0.3, 0.25, 0.15]),
    "any order": ([3, 0, 4], [0.2, 0.7, 0.1]),
    "one token": ([2], [1.0]),
    "a token of no weight": ([1, 3, 4], [0.5, 0.0, 0.5]),
    "a little too much": ([0, 1, 2], [0.5004, 0.25, 0.25]),
    "a little too little": ([0, 1, 2], [0.4996, 0.25, 0.25]),
    "tokens beyond the vocabulary": ([0, 7, 10**6, LARGEST_ID], [0.25, 0.25, 0.25, 0.25]),
    "nothing but tokens beyond the vocabulary": ([SIZE, LARGEST_ID], [0.5, 0.5]),
}
IMPOSSIBLE = {
    "too much": ([0, 1, 2], [0.6, 0.3, 0.3]),
    "too little": ([0, 1, 2], [0.3, 0.3, 0.3]),
    "nothing": ([0, 1, 2], [0.0, 0.0, 0.0]),
    "negative": ([0, 1, 2], [-0.5, 0.75, 0.75]),
    "above one": ([0, 1, 2], [1.5, -0.25, -0.25]),
    "not a number": ([0, 1, 2], [NAN, 0.5, 0.5]),
    "infinite": ([0, 1, 2], [INFINITY, 0.5, 0.5]),
    "more tokens": ([0, 1, 2], [0.5, 0.5]),
    "more probabilities": ([0, 1], [0.5, 0.25, 0.25]),
    "twice the same token": ([0, 1, 1], [0.5, 0.25, 0.25]),
    "other tokens": ([9, 10], [0.5, 0.5]),
    "no weight on what was drafted": ([0, 1, 2, 3, 4, 9], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
}


class Dice:
    """Stands in for `gumbel.uniform`: the numbers are set by hand, one per stream."""

    def __init__(self) -> None:
        self.numbers: dict[int, float] = {}

    def __call__(self, seed: int, stream: int, *counters: int) -> float:
        return self.numbers[stream]


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> Dice:
    dice = Dice()
    monkeypatch.setattr("protocol.decoding.rejection.uniform", dice)
    return dice


def next_token(row: npt.NDArray[np.float32], drafted: int, sent: DraftDistribution) -> int:
    """What is committed at the position of a draft token."""
    rows = np.stack([row, row])
    accepted, bonus = verify_draft(rows, [drafted], [sent], 40, SAMPLING)
    return drafted if accepted else bonus


@pytest.mark.parametrize("name", POSSIBLE)
@pytest.mark.parametrize("row", ROWS[:, 0], ids=str)
def test_what_can_be_drawn_from_leaves_the_target_alone(
    dice: Dice, name: str, row: npt.NDArray[np.float32]
) -> None:
    """Summed over all drafts and all numbers, the token has exactly the distribution p."""
    tokens, probabilities = POSSIBLE[name]
    sent = DraftDistribution(tokens, probabilities)
    q = np.array(probabilities) / sum(probabilities)
    p = softmax(row.astype(np.float64))
    shares = {token: share for token, share in zip(tokens, q, strict=True) if token < SIZE}
    rest = np.maximum(p - np.array([shares.get(token, 0.0) for token in range(SIZE)]), 0.0)
    cuts = [*np.cumsum(p), *(np.cumsum(rest) / rest.sum() if rest.sum() else [])]
    joint = np.zeros(SIZE)
    for drafted, share in zip(tokens, q, strict=True):
        if share == 0.0:
            continue  # it is never drawn
        ratio = p[drafted] / share if drafted < SIZE else 0.0
        for accept, accept_share in _pieces([ratio]):
            for bonus, bonus_share in _pieces(cuts):
                dice.numbers = {ACCEPT: accept, BONUS: bonus}
                joint[next_token(row, drafted, sent)] += share * accept_share * bonus_share
    assert joint == pytest.approx(p, abs=1e-7)


def _pieces(cuts: list[float]) -> list[tuple[float, float]]:
    """(middle, length) of the pieces into which these points cut the interval from 0 to 1."""
    inside = sorted({0.0, 1.0, *(float(cut) for cut in cuts if 0.0 < cut < 1.0)})
    return [((low + high) / 2, high - low) for low, high in pairwise(inside)]


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize("drafted", [0, 2])
def test_what_cannot_be_drawn_from_is_not_used(name: str, drafted: int) -> None:
    """No draft token comes with it into a chain; a verifier that gets it says so."""
    sent = DraftDistribution(*IMPOSSIBLE[name])
    with pytest.raises(ProtocolError, match="cannot have been drawn"):
        next_token(ROWS[0, 0], drafted, sent)
    tree = DraftTree(
        sequence=1,
        round=1,
        depth=1,
        outcomes=[(0, 3)],
        tokens=[drafted],
        confidences=[0.9],
        distributions=[sent],
        draft_ms=1.0,
    )
    assert Draft().grow(tree, 0, 0) is None


@pytest.mark.parametrize("name", ["negative", "above one", "not a number", "infinite"])
def test_numbers_that_are_no_probabilities_are_no_message(name: str) -> None:
    """They do not even pass the wire."""
    decoder: Decoder[DraftTree] = Decoder(DraftTree)
    tree = DraftTree(
        sequence=1,
        round=1,
        depth=1,
        outcomes=[(0, 3)],
        tokens=[0],
        confidences=[0.9],
        distributions=[DraftDistribution(*IMPOSSIBLE[name])],
        draft_ms=1.0,
    )
    with pytest.raises(ProtocolError, match="no message that is valid here"):
        decoder.decode(encode(tree))


def test_large_ids_take_no_memory(dice: Dice) -> None:
    """The largest id that a message may have costs nothing: it is no index of anything."""
    dice.numbers = {ACCEPT: 0.5, BONUS: 0.5}
    tokens, probabilities = POSSIBLE["tokens beyond the vocabulary"]
    tracemalloc.start()
    try:
        next_token(ROWS[0, 0], LARGEST_ID, DraftDistribution(tokens, probabilities))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
