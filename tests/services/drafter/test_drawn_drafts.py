"""Under the rejection rule the neural backend draws from the distributions that it sends."""

from functools import cache

import msgspec
import numpy as np
import pytest

from protocol.decoding.gumbel import DRAFT, uniform
from protocol.decoding.rejection import Distribution, drafter_distribution, draw_token
from protocol.decoding.sampler import Floats
from protocol.decoding.sampling_params import drafter_sampling
from protocol.decoding.token_tree import read_tree
from protocol.messages import DraftDistribution, Sampling, Tokens
from services.drafter.backends.base import DraftedToken, RoundOptions
from services.drafter.backends.mlx import MlxBackend
from tests.support.reference import drafts, reference, said, tiny_folder

PROMPT = [0, 2, 97, 41, 250, 33, 8, 141, 77, 19, 203, 64]
CHAIN = [120, 7, 160]
CANDIDATES = 64
TURN = RoundOptions(17, 3)
WARM = Sampling(temperature=0.9, seed=5, acceptance="rejection")
SAMPLINGS = {
    "plain": WARM,
    "own": msgspec.structs.replace(WARM, draft_temperature=1.7, draft_top_p=0.8),
    "saguaro": msgspec.structs.replace(WARM, saguaro=0.3, top_k=20),
}


@cache
def backend() -> MlxBackend:
    return MlxBackend(tiny_folder("llama"), prefill_step_size=5)


def opened(sampling: Sampling) -> MlxBackend:
    list(backend().open(1, PROMPT, sampling))
    return backend()


def check(found: DraftedToken, row: Floats, position: int, sampling: Sampling) -> None:
    """The distribution is that of fresh logits, and the token is its draw in this round."""
    best = np.argsort(-row)[:CANDIDATES]
    expected = drafter_distribution(best, row[best], drafter_sampling(sampling), TURN.held_back)
    sent = dict(zip(found.distribution.tokens, found.distribution.probabilities, strict=True))
    assert set(sent) == set(expected.ids.tolist())
    for token, probability in zip(expected.ids.tolist(), expected.probabilities, strict=True):
        assert sent[token] == pytest.approx(probability, abs=1e-4)
    distribution = Distribution(
        np.array(found.distribution.tokens), np.array(found.distribution.probabilities)
    )
    assert found.token == draw_token(
        distribution, uniform(sampling.seed, DRAFT, TURN.number, position)
    )


def rows_after(tokens: Tokens) -> list[Floats]:
    return reference("llama").rows([tokens])[0]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_every_branch_draws_from_the_law_it_sends(sampling: Sampling) -> None:
    """At each depth: the distribution of the branch's own prefix, and the position's own number."""
    layers = said(opened(sampling).prepare(1, read_tree(CHAIN), [2, 1, 3], 3, TURN))
    assert len(layers) == 3
    for branch, root in enumerate(layers[0].outcomes):
        path = [*PROMPT, *CHAIN[: root.accepted + 1], root.bonus]
        for layer in layers:
            drafted = DraftedToken(layer.tokens[branch], 0.0, layer.distributions[branch])
            check(drafted, rows_after(path)[-1], len(path), sampling)
            path.append(drafted.token)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_outcomes_are_ranked_not_drawn(sampling: Sampling) -> None:
    """Prepared bonus tokens are the draft's likeliest, without the drafted one."""
    [layer] = said(opened(sampling).prepare(1, read_tree(CHAIN), [3, 3, 3], 1, TURN))
    rows = rows_after([*PROMPT, *CHAIN])[len(PROMPT) :]
    expected = []
    for accepted, row in enumerate(rows):
        best = np.argsort(-row)[:4].tolist()
        rejected = [*CHAIN, None][accepted + 1]
        expected += [(accepted, token) for token in best if token != rejected][:3]
    # The first candidate after the rejected one may be the fourth best.
    assert [(root.accepted, root.bonus) for root in layer.outcomes] == [
        pair for k in range(3) for pair in [p for p in expected if p[0] == k][:3]
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_draft_for_the_waiting_target_is_drawn_too(sampling: Sampling) -> None:
    """One distribution per token, of the prefix with the tokens drawn before it."""
    drafted = drafts(opened(sampling).draft(1, CHAIN[0], 3, TURN))
    path = [*PROMPT, CHAIN[0]]
    for found in drafted:
        check(found, rows_after(path)[-1], len(path), sampling)
        path.append(found.token)


def test_rounds_draw_independently() -> None:
    """The same question in another round gives other tokens, in the same one the same."""
    flat = msgspec.structs.replace(WARM, draft_temperature=20.0)

    def tokens(number: int) -> Tokens:
        return [
            d.token for d in drafts(opened(flat).draft(1, CHAIN[0], 4, RoundOptions(number, 3)))
        ]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.9),
        Sampling(acceptance="rejection"),
        Sampling(temperature=0.9, acceptance="rejection", draft_temperature=0.0),
    ],
    ids=["coupled", "greedy", "greedy drafter"],
)
def test_what_is_not_drawn_has_no_distribution(sampling: Sampling) -> None:
    """Coupled and greedy drafts are sent without distributions."""
    [layer] = said(opened(sampling).prepare(1, read_tree(CHAIN), [2, 1, 3], 1, TURN))
    assert layer.distributions == []
    backend().commit(1, len(PROMPT), [])
    [found] = drafts(backend().draft(1, CHAIN[0], 1, TURN))
    assert found.distribution == DraftDistribution()
