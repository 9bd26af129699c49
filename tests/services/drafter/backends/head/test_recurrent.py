"""EAGLE-3 and MTP heads draft what plain numpy says, whatever came of the target and when."""

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.decoding.token_tree import read_tree
from protocol.errors import ModelError
from protocol.messages import LogitsOptions, Sampling, Tokens
from services.drafter.backends.base import Outcome, RoundOptions, Rows
from services.drafter.backends.head.loading import load_head
from services.mlx.loader import load
from tests.support.head_reference import Array, Eagle3Reference, MtpReference
from tests.support.reading import CHAIN, ORDERS, check_company, check_order, grow, open_sequence
from tests.support.reference import drafts
from tests.support.tiny_models import vocabulary_size, write_tiny_model
from tests.support.write_heads import WIDTH, eagle3, mtp, write_head

PROMPT = [2, 97, 41, 250, 33, 8, 141, 77, 19]
LAYERS = 3


@dataclass
class Case:
    """A head in a folder, its target, and what it must equal."""

    folder: Path
    target: Path
    reference: Any
    count: int
    """Layers that it reads."""
    normalization: str

    def states(self, position: int) -> list[Array]:
        """The target's at a position, layer by layer; made up."""
        rng = np.random.default_rng(position)
        return [rng.standard_normal(WIDTH) for _ in range(self.count)]

    def sent(self, first: int, stop: int) -> Rows:
        """The same, as a verifier sends them that projects nothing."""
        rows = []
        for position in range(first, stop):
            states = self.states(position)
            if self.normalization == "layer":
                states = [s / np.sqrt((s * s).mean()) for s in states]
            row = np.concatenate(states)
            if self.normalization == "joint":
                row = row / np.sqrt((row * row).mean())
            rows.append(row)
        return np.array(rows, np.float32)


def embedding(target: Path) -> Array:
    """The target's, which is its output head, too."""
    module = load(target).module
    text = getattr(module, "language_model", module)
    return np.array(text.model.embed_tokens.weight).astype(np.float64)


VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {"layers": [1, 2, 3]},
    "trimmed": {"layers": [1, 2, 3], "trimmed": 60},
    "normed": {"layers": [2], "norm_before_residual": True, "norm_output": True},
    "joint": {"layers": [1, 3], "norm_before_fc": True},
    "fc_norm": {"layers": [1, 3], "fc_norm": True},
    "mtp": {},
}


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    base = tmp_path_factory.mktemp("heads")
    if request.param == "mtp":
        target = write_tiny_model(base / "t", "qwen3_5")
        config = json.loads((target / "config.json").read_text("utf-8"))
        tensors = mtp()
        write_head(base / "h", config, tensors)
        text = config["text_config"]
        reference: Any = MtpReference(tensors, text, embedding(target))
        return Case(base / "h", target, reference, 1, "final")
    target = write_tiny_model(base / "t", "llama", layers=LAYERS)
    variant = VARIANTS[request.param]
    config, tensors = eagle3(vocabulary_size(), **variant)
    write_head(base / "h", config, tensors)
    reference = Eagle3Reference(tensors, config, embedding(target))
    normalization = "joint" if "norm_before_fc" in variant else "none"
    normalization = "layer" if "fc_norm" in variant else normalization
    return Case(base / "h", target, reference, len(variant["layers"]), normalization)


def opened(case: Case, tokens: Tokens, sampling: Sampling | None = None) -> Any:
    backend: Any = load_head(case.folder, case.target, 4, beside_target=False)
    return open_sequence(backend, tokens, sampling)


def drafted(backend: Any, pending: int, count: int) -> Tokens:
    return [one.token for one in drafts(backend.draft(1, pending, count))]


def expected_logits(case: Case, tokens: Tokens, known: tuple[int, int]) -> Array:
    """After the last of these tokens; the target's states of positions in `known` are given."""
    seen: list[tuple[Array, Array]] = []
    state, logits = np.zeros(WIDTH), np.zeros(0)
    for row, position in enumerate(range(known[0], len(tokens) - 1)):
        if position < known[1]:
            state = case.reference.fuse(case.states(position))
        logits, state = case.reference.row(tokens[position + 1], state, row, seen)
    return logits


def best(logits: Array, count: int = 3) -> Tokens:
    order: Tokens = np.argsort(-logits, kind="stable")[:count].tolist()
    return order


def test_chain_and_branches_are_those_of_the_reference(case: Case) -> None:
    """The candidates after every token of a chain, and every token of every branch."""
    backend = opened(case, PROMPT)
    backend.read(1, 0, case.sent(0, len(PROMPT)))
    layers = grow(backend)
    known = (0, len(PROMPT))
    for place in range(len(CHAIN)):
        trunk = PROMPT + CHAIN[: place + 1]
        rejected = CHAIN[place + 1] if place + 1 < len(CHAIN) else None
        wanted = [t for t in best(expected_logits(case, trunk, known)) if t != rejected][:2]
        assert [o.bonus for o in layers[0].outcomes if o.accepted == place] == wanted
        for bonus in wanted:
            column = layers[0].outcomes.index(Outcome(place, bonus))
            branch = [*trunk, bonus]
            for layer in layers:
                assert layer.tokens[column] == best(expected_logits(case, branch, known))[0]
                branch.append(layer.tokens[column])


def test_a_draft_is_that_of_the_reference(case: Case) -> None:
    """Token by token on the head's own output; with noise, the noise's positions are right."""
    backend = opened(case, PROMPT)
    backend.read(1, 0, case.sent(0, len(PROMPT)))
    tokens = [*PROMPT, 30]
    for token in drafted(backend, 30, 4):
        assert token == best(expected_logits(case, tokens, (0, len(PROMPT))))[0]
        tokens.append(token)


def test_a_draft_with_siblings_is_the_same_draft(case: Case) -> None:
    """Its likeliest tokens are those of a plain draft, with the target's states or without."""
    for stop in (len(PROMPT), 0):
        backend, other = opened(case, PROMPT), opened(case, PROMPT)
        for one in (backend, other) if stop else ():
            one.read(1, 0, case.sent(0, stop))
        layers = [layer for layer in backend.draft(1, 30, 3, RoundOptions(siblings=1)) if layer]
        assert [layer.tokens[0] for layer in layers] == drafted(other, 30, 3)


def test_true_states_replace_the_heads_own(case: Case) -> None:
    """After a hit and after a miss, drafts are those of a head that had the states at once."""
    for hit in (True, False):
        backend = opened(case, PROMPT)
        backend.read(1, 0, case.sent(0, len(PROMPT)))
        layers = grow(backend)
        outcome = layers[0].outcomes[1]
        tokens = PROMPT + CHAIN[: outcome.accepted + 1]
        chain = [outcome.bonus, *(layer.tokens[1] for layer in layers[:2])] if hit else [7]
        backend.read(1, len(PROMPT), case.sent(len(PROMPT), len(tokens)))
        backend.commit(1, len(PROMPT), tokens[len(PROMPT) :])
        fresh = opened(case, tokens)
        fresh.read(1, 0, case.sent(0, len(tokens)))
        first = grow(backend, chain)[0].outcomes[:2]
        assert first == grow(fresh, chain)[0].outcomes[:2]
        assert drafted(backend, 30, 4) == drafted(fresh, 30, 4)


@pytest.mark.parametrize("order", ORDERS)
def test_when_states_come_does_not_matter(case: Case, order: str) -> None:
    """Before or after the tokens, in any order, or again: the next draft has them all."""
    check_order(order, partial(opened, case), PROMPT, case.sent(0, len(PROMPT + CHAIN)))


def test_states_of_the_beginning_may_be_missing(case: Case) -> None:
    """Then the head's rows begin later; without any, with the pending token."""
    backend = opened(case, PROMPT)
    backend.read(1, 4, case.sent(4, len(PROMPT)))
    tokens = [*PROMPT, 30]
    assert drafted(backend, 30, 1) == best(expected_logits(case, tokens, (4, len(PROMPT))), 1)
    alone = opened(case, PROMPT)
    last = len(PROMPT) - 1
    assert drafted(alone, 30, 2)[:1] == best(expected_logits(case, tokens, (last, last)), 1)
    for _ in range(20):
        alone.commit(1, len(PROMPT), [])
        assert grow(alone)


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


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=3)])
def test_in_company_each_sequence_is_drafted_for_as_if_alone(
    case: Case, sampling: Sampling
) -> None:
    """Sequences take turns, with states and without, and draft what they would."""
    prompts = [PROMPT, PROMPT[:5], [7, 8, 9, 10, 11, 12], PROMPT[::-1]]
    backend: Any = load_head(case.folder, case.target, 4, beside_target=False)

    def begin(number: int) -> Any:
        prompt = prompts[number]
        for _ in backend.open(number, prompt, sampling):
            pass
        if number != 2:
            backend.read(number, 0, case.sent(0, len(prompt)))
        return backend.prepare(number, read_tree(CHAIN[number % 2 :]), [2, 1], 3)

    check_company(backend, begin, len(prompts))


def test_long_stretches_without_states_are_left_out(case: Case) -> None:
    """Where decoding went on without drafts and states, the head begins anew."""
    backend = opened(case, PROMPT)
    backend.read(1, 0, case.sent(0, len(PROMPT)))
    drafted(backend, 30, 2)
    more = list(range(100, 140))
    backend.commit(1, len(PROMPT), more)
    tokens = [*PROMPT, *more, 30]
    last = len(tokens) - 2
    assert drafted(backend, 30, 1) == best(expected_logits(case, tokens, (last, last)), 1)


def test_rejected_states_are_forgotten(case: Case) -> None:
    """A sequence that goes back drafts as one that never was ahead."""
    backend = opened(case, PROMPT + CHAIN)
    backend.read(1, 0, case.sent(0, len(PROMPT) + 3))
    drafted(backend, 30, 3)
    backend.commit(1, len(PROMPT), [])
    fresh = opened(case, PROMPT)
    fresh.read(1, 0, case.sent(0, len(PROMPT)))
    assert drafted(backend, 31, 3) == drafted(fresh, 31, 3)


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


def test_states_of_another_drafter_are_ignored(case: Case) -> None:
    """They were on their way when the drafters were swapped."""
    backend = opened(case, PROMPT)
    backend.read(1, 0, np.zeros((len(PROMPT), 7), np.float16))
    backend.read(2, 0, case.sent(0, 2))
    backend.read(1, 0, case.sent(0, len(PROMPT)))
    assert grow(backend)


@pytest.mark.parametrize("heads", ["four", 0, [4]])
def test_a_config_that_is_wrong_is_named(case: Case, tmp_path: Path, heads: object) -> None:
    """Not a number, or one that nothing can be divided by: a sentence with the folder."""
    folder = tmp_path / "head"
    shutil.copytree(case.folder, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config.get("text_config", config)["num_attention_heads"] = heads
    config.get("text_config", config).pop("head_dim", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"head' is wrong"):
        load_head(folder, case.target, 4, beside_target=False)
