"""DFlash, DFlash 2 and DSpark heads draft what plain numpy says, whatever is known and when."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import ModelError
from protocol.messages import END_OF_BRANCH, LogitsOptions, Sampling, Tokens
from services.drafter.backends.base import DraftedToken, Outcome, Rows
from services.drafter.backends.head.loading import load_head
from services.mlx.loader import load
from tests.support.head_reference import Array, BlockReference
from tests.support.reading import CHAIN, ORDERS, check_drafts, check_order, grow, open_sequence
from tests.support.reference import drafts
from tests.support.tiny_models import vocabulary_size, write_tiny_model
from tests.support.write_heads import WIDTH, dflash, write_head

PROMPT = [2, 97, 41, 250, 33, 8, 141, 77, 19]
LAYERS = [0, 2]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "sliding": ("dflash", SLIDING),
    "both-ways": ("dflash", SLIDING | {"is_causal": False}),
    "dflash2": ("dflash2", {}),
    "dspark": ("dspark", {}),
}


@dataclass
class Case:
    """A head in a folder, its target, and what it must equal."""

    folder: Path
    target: Path
    reference: BlockReference
    shift: int
    """Slots that a prediction stands before its token."""
    blocks: dict[tuple[Any, ...], list[Array]] = field(default_factory=dict)
    """The reference's rows, by whose states there are and the tokens that begin the block."""

    def states(self, position: int) -> list[Array]:
        """The target's at a position, layer by layer; made up."""
        rng = np.random.default_rng(position)
        return [rng.standard_normal(WIDTH) for _ in LAYERS]

    def sent(self, first: int, stop: int) -> Rows:
        """The same, as a verifier sends them that projects nothing."""
        return np.array([np.concatenate(self.states(p)) for p in range(first, stop)], np.float32)

    def slot(self, tokens: Tokens, known: range, drafted: int = 0) -> Array:
        """What the block has after these, the last `drafted` of which were masks in the pass."""
        at = known.stop
        block = (known, *tokens[at : len(tokens) - drafted])
        if block not in self.blocks:
            states = {p: self.states(p) for p in known}
            self.blocks[block] = self.reference.hidden(list(block[1:]), at, states)
        return self.blocks[block][len(tokens) - at - self.shift]

    def best(self, tokens: Tokens, known: range, drafted: int = 0, count: int = 1) -> Tokens:
        """The best tokens after these: see `slot`."""
        scores = self.reference.scores(self.slot(tokens, known, drafted), tokens[-1])
        found: Tokens = np.argsort(-scores, kind="stable")[:count].tolist()
        return found


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return write_case(tmp_path_factory.mktemp("heads"), request.param)


def write_case(base: Path, variant: str) -> Case:
    """A head of this variant, and its target."""
    target = write_tiny_model(base / "t", "qwen3")
    name, more = VARIANTS[variant]
    config, tensors = dflash(vocabulary_size(), name, layers=LAYERS, count=3, **more)
    write_head(base / "h", config, tensors)
    weight = load(target).module.model.embed_tokens.weight
    reference = BlockReference(tensors, config, np.array(weight).astype(np.float64))
    return Case(base / "h", target, reference, int(name == "dspark"))


def opened(case: Case, tokens: Tokens, sampling: Sampling | None = None) -> Any:
    backend: Any = load_head(case.folder, case.target, 4, beside_target=False)
    return open_sequence(backend, tokens, sampling)


def drafted(backend: Any, pending: int, count: int) -> list[DraftedToken]:
    return drafts(backend.draft(1, pending, count))


def test_chain_and_branches_are_those_of_the_reference(case: Case) -> None:
    """The candidates after every prefix of a chain, and every token of every branch."""
    backend = opened(case, PROMPT)
    backend.read(1, 0, case.sent(0, len(PROMPT)))
    layers = grow(backend)
    known = range(len(PROMPT))
    for place in range(len(CHAIN)):
        trunk = PROMPT + CHAIN[: place + 1]
        rejected = CHAIN[place + 1] if place + 1 < len(CHAIN) else None
        wanted = [t for t in case.best(trunk, known, count=3) if t != rejected][:2]
        assert [o.bonus for o in layers[0].outcomes if o.accepted == place] == wanted
        for bonus in wanted:
            column = layers[0].outcomes.index(Outcome(place, bonus))
            branch = [*trunk, bonus]
            for depth, layer in enumerate(layers):
                assert [layer.tokens[column]] == case.best(branch, known, depth)
                branch.append(layer.tokens[column])


def test_a_draft_is_that_of_the_reference(case: Case) -> None:
    """As many tokens as the block has room for, and no more."""
    backend = opened(case, PROMPT)
    backend.read(1, 0, case.sent(0, len(PROMPT)))
    tokens = [*PROMPT, 30]
    found = drafted(backend, 30, 20)
    assert len(found) == 8 - 1 + case.shift
    for depth, one in enumerate(found):
        assert [one.token] == case.best(tokens, range(len(PROMPT)), depth)
        tokens.append(one.token)


def test_confidences_are_the_heads_own(case: Case) -> None:
    """DSpark's head for them; the others' are the probability of the token."""
    backend = opened(case, PROMPT)
    backend.read(1, 0, case.sent(0, len(PROMPT)))
    found = drafted(backend, 30, 3)
    assert all(0.0 < one.confidence < 1.0 for one in found)
    if case.shift:
        states = {p: case.states(p) for p in range(len(PROMPT))}
        hidden = case.reference.hidden([30], len(PROMPT), states)
        before = [30, *(one.token for one in found)]
        told = [case.reference.confidence(h, b) for h, b in zip(hidden, before, strict=False)]
        assert np.allclose([one.confidence for one in found], told[:3], atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_when_states_come_does_not_matter(case: Case, order: str) -> None:
    """Before or after the tokens, in any order, or again: the next draft has them all."""
    check_order(order, partial(opened, case), PROMPT, case.sent(0, len(PROMPT + CHAIN)))


def test_tokens_without_states_enter_the_block(case: Case) -> None:
    """Known ones, as long as there is room; then only the pending one does."""
    backend = opened(case, PROMPT + CHAIN)
    backend.read(1, 0, case.sent(0, len(PROMPT)))
    tokens = [*PROMPT, *CHAIN, 30]
    assert [drafted(backend, 30, 1)[0].token] == case.best(tokens, range(len(PROMPT)))
    backend.commit(1, len(PROMPT) + len(CHAIN), list(range(100, 120)))
    assert drafted(backend, 30, 1)
    assert grow(backend)


def test_the_beginning_or_all_states_may_be_missing(case: Case) -> None:
    """The context begins later, or there is none."""
    backend = opened(case, PROMPT)
    backend.read(1, 4, case.sent(4, len(PROMPT)))
    tokens = [*PROMPT, 30]
    assert [drafted(backend, 30, 1)[0].token] == case.best(tokens, range(4, len(PROMPT)))
    alone = opened(case, PROMPT)
    nothing = range(len(PROMPT), len(PROMPT))
    assert [drafted(alone, 30, 1)[0].token] == case.best(tokens, nothing)


def test_states_of_tokens_to_come_wait(case: Case) -> None:
    """What came behind a gap, ahead of the tokens, is used when these are there."""
    ahead = len(PROMPT) + 3
    backend, alone = opened(case, PROMPT), opened(case, PROMPT)
    backend.read(1, ahead, case.sent(ahead, ahead + 2))
    assert drafted(backend, 30, 3) == drafted(alone, 30, 3)
    assert [one.tokens for one in grow(backend)] == [one.tokens for one in grow(alone)]
    backend.commit(1, len(PROMPT), [30, *CHAIN, 40])
    fresh = opened(case, [*PROMPT, 30, *CHAIN, 40])
    fresh.read(1, ahead, case.sent(ahead, ahead + 2))
    assert drafted(backend, 31, 3) == drafted(fresh, 31, 3)


def test_a_sequence_that_goes_back_drafts_as_if_it_never_was_ahead(case: Case) -> None:
    """What was read of tokens that do not stand is forgotten."""
    backend = opened(case, PROMPT + CHAIN)
    backend.read(1, 0, case.sent(0, len(PROMPT) + 3))
    drafted(backend, 30, 3)
    backend.commit(1, len(PROMPT), [])
    fresh = opened(case, PROMPT)
    fresh.read(1, 0, case.sent(0, len(PROMPT)))
    check_drafts(drafted(fresh, 31, 3), drafted(backend, 31, 3))


def test_blocks_that_are_full_end_their_branches(case: Case) -> None:
    """A chain as long as the block leaves no room behind its end, but behind its beginning."""
    backend = opened(case, PROMPT)
    backend.read(1, 0, case.sent(0, len(PROMPT)))
    chain = [203, 64, 5, 9, 8, 7, 6, 11, 12, 13]
    layers = grow(backend, chain, 6)
    lengths = {o.accepted for o in layers[0].outcomes}
    assert lengths == set(range(7 + case.shift))
    ended = [o for o, t in zip(layers[0].outcomes, layers[-1].tokens, strict=True) if t < 0]
    assert END_OF_BRANCH < 0
    assert ended
    assert all(o.accepted > 0 for o in ended)


def test_penalties_and_bans_apply(case: Case) -> None:
    """What the request rules out is not drafted."""
    backend = opened(case, PROMPT)
    backend.read(1, 0, case.sent(0, len(PROMPT)))
    banned = grow(backend)[0].outcomes[0].bonus
    options = LogitsOptions(logit_bias=((banned, -1e9),), answer_from=len(PROMPT))
    backend = opened(case, PROMPT, Sampling(logits_options=options))
    backend.read(1, 0, case.sent(0, len(PROMPT)))
    layers = grow(backend)
    assert banned not in {o.bonus for o in layers[0].outcomes}
    assert all(banned not in layer.tokens for layer in layers)


def test_drawn_tokens_come_with_their_distributions(case: Case) -> None:
    """Under the rejection rule, one for each branch."""
    backend = opened(case, PROMPT, Sampling(temperature=0.8, seed=2, acceptance="rejection"))
    backend.read(1, 0, case.sent(0, len(PROMPT)))
    for layer in grow(backend):
        assert len(layer.distributions) == len(layer.tokens)
        for token, drawn in zip(layer.tokens, layer.distributions, strict=True):
            assert token in drawn.tokens


def test_variants_that_are_not_known_are_refused(tmp_path: Path) -> None:
    """Rather than drafted with wrongly."""
    target = write_tiny_model(tmp_path / "t", "qwen3")
    config, tensors = dflash(
        vocabulary_size(), "dspark", layers=LAYERS, count=3, markov_head_type="gated"
    )
    write_head(tmp_path / "h", config, tensors)
    with pytest.raises(ModelError, match="variant of DSpark"):
        load_head(tmp_path / "h", target, 4, beside_target=False)
    config, tensors = dflash(vocabulary_size(), "dflash", layers=LAYERS, count=3)
    del tensors["layers.1.mlp.up_proj.weight"]
    write_head(tmp_path / "g", config, tensors)
    with pytest.raises(ModelError, match="does not match the format dflash"):
        load_head(tmp_path / "g", target, 4, beside_target=False)
