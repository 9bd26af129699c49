"""Drafts of a backend that reads the target: as in training, and without states as without."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.decoding.token_tree import read_tree
from protocol.errors import ModelError
from protocol.messages import LogitsOptions, Sampling, Tokens
from protocol.settings import READING_WAYS, ReadingWay
from services.distill.context import Blocks, context_of, logits_in_context
from services.drafter.backends.base import Rows
from services.drafter.backends.mlx import MlxBackend
from services.drafter.backends.mlx_reading import ReadingBackend
from services.drafter.backends.self_feeding import SelfFeedingBackend
from services.drafter.sliding_context import SlidingContextBackend
from services.mlx.loader import load
from services.mlx.target_reader import (
    WEIGHTS,
    ReaderDescription,
    flat_parameters,
    load_reader,
    new_reader,
    read_description,
    save_reader,
)
from tests.support.reading import (
    CHAIN,
    ORDERS,
    check_company,
    check_drafts,
    check_order,
    feed_loudly,
    grow,
    open_sequence,
    watch_passes,
)
from tests.support.reference import said
from tests.support.tiny_models import write_tiny_model

PROMPT = [0, 2, 97, 41, 250, 33, 8, 141, 77, 19]
WIDTH = 48
"""Of the states: two layers of a target half as wide as the drafter."""
FAMILIES = ("llama", "qwen3", "gemma3")


@pytest.fixture(scope="module", params=itertools.product(FAMILIES, READING_WAYS), ids="-".join)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reading_drafter(tmp_path_factory.mktemp("d"), *request.param)


def reading_drafter(folder: Path, family: str = "llama", way: ReadingWay = "states") -> Path:
    """A tiny drafter that reads states with random weights."""
    write_tiny_model(folder, family)
    mx.random.seed(5)
    reader = new_reader(WIDTH, load(folder).module, way)
    if reader.enters_input:
        feed_loudly(reader)
    description = ReaderDescription([0, 2], WIDTH // 2, way=way)
    save_reader(folder, description, flat_parameters(reader), mx.float32)
    return folder


def states(count: int, first: int = 0) -> Rows:
    """The same for a position, whenever they are asked for."""
    rows = [np.random.default_rng(first + i).standard_normal(WIDTH) for i in range(count)]
    return np.array(rows, np.float16)


def opened(folder: Path, tokens: Tokens, sampling: Sampling | None = None) -> ReadingBackend:
    return open_sequence(load_backend(folder), tokens, sampling)


def load_backend(folder: Path) -> ReadingBackend:
    reads = read_description(folder)
    assert reads is not None
    return SelfFeedingBackend(folder, 4) if reads.way == "input" else ReadingBackend(folder, 4)


def expected_best(folder: Path, tokens: Tokens, known: int, rows: Rows, at: int) -> Tokens:
    """The best tokens after `tokens[: at + 1]` in training's pass, `known` states given."""
    module = load(folder).module
    found = load_reader(folder, mx.float32)
    assert found is not None
    count = at + 1
    starts = np.minimum(np.arange(count), known)[None].astype(np.int32)
    features = np.zeros((1, count, WIDTH), np.float32)
    features[0, :known] = rows[:known]
    context = context_of(mx.array(features), Blocks(starts, np.zeros(1, np.int32)))
    inputs = mx.array([tokens[:count]]), mx.array([count - 1])
    logits = logits_in_context(module, found[1], context, inputs, count - known)[-1]
    best: Tokens = np.argsort(-np.array(logits), kind="stable")[:3].tolist()
    return best


def test_it_drafts_as_it_was_trained(folder: Path) -> None:
    """The candidates behind each token of the chain are those of the training's own pass."""
    backend = opened(folder, PROMPT)
    rows = states(len(PROMPT))
    backend.read(1, 0, rows)
    layers = grow(backend)
    tokens = PROMPT + CHAIN
    for place in range(len(CHAIN)):
        best = expected_best(folder, tokens, len(PROMPT), rows, len(PROMPT) + place)
        rejected = CHAIN[place + 1] if place + 1 < len(CHAIN) else None
        wanted = [token for token in best if token != rejected][:2]
        bonuses = [o.bonus for o in layers[0].outcomes if o.accepted == place]
        assert wanted == bonuses
        first = layers[0].outcomes.index((place, bonuses[0]))
        branch = [*tokens[: len(PROMPT) + place + 1], bonuses[0]]
        drafted = layers[0].tokens[first]
        assert drafted == expected_best(folder, branch, len(PROMPT), rows, len(branch) - 1)[0]


def test_after_a_hit_it_drafts_as_it_was_trained(folder: Path) -> None:
    """A branch that becomes the chain goes on from what was computed of it."""
    backend = opened(folder, PROMPT)
    rows = states(len(PROMPT))
    backend.read(1, 0, rows)
    layers = grow(backend)
    branch = next(i for i, outcome in enumerate(layers[0].outcomes) if outcome.accepted == 1)
    chain = [layers[0].outcomes[branch].bonus, layers[0].tokens[branch], layers[1].tokens[branch]]
    backend.commit(1, len(PROMPT), CHAIN[:2])
    computed = watch_passes(backend)
    [first, *_] = grow(backend, chain)
    # Nothing of the chain; depths that are begun ahead do not go through the batcher.
    assert len(computed) == (len(layers) if backend.ahead is None else 0)
    tokens = PROMPT + CHAIN[:2] + chain
    for place in range(len(chain)):
        best = expected_best(folder, tokens, len(PROMPT), rows, len(PROMPT) + 2 + place)
        rejected = chain[place + 1] if place + 1 < len(chain) else None
        bonuses = [o.bonus for o in first.outcomes if o.accepted == place]
        assert bonuses == [token for token in best if token != rejected][:2]


def test_trees_are_drafted_for_as_it_was_trained(folder: Path) -> None:
    """Behind each row of a tree, that row's path decides."""
    backend = opened(folder, PROMPT)
    rows = states(len(PROMPT))
    backend.read(1, 0, rows)
    tree = read_tree([203, 64, 5, 77, 12], [0, 0, 1, 2])
    found = backend.prepare_tree(1, tree, [2] * len(tree), 2)
    layers = [layer for layer in found if layer is not None]
    for row in range(len(tree)):
        path = PROMPT + tree.tokens_to(row)
        best = expected_best(folder, path, len(PROMPT), rows, len(path) - 1)
        wanted = [token for token in best if token not in tree.children[row]]
        bonuses = [o.bonus for o in layers[0].outcomes if o.accepted == row]
        assert bonuses[: len(wanted)] == wanted[:2]
        branch = [*path, bonuses[0]]
        drafted = layers[0].tokens[layers[0].outcomes.index((row, bonuses[0]))]
        assert drafted == expected_best(folder, branch, len(PROMPT), rows, len(branch) - 1)[0]


def test_in_company_each_sequence_is_drafted_for_as_if_alone(folder: Path) -> None:
    """Sequences take turns, with states and without, and draft what they would."""
    prompts = [PROMPT, PROMPT[:5], [7, 8, 9, 10, 11, 12], PROMPT[::-1]]
    backend = load_backend(folder)

    def begin(number: int) -> Any:
        for _ in backend.open(number, prompts[number], Sampling()):
            pass
        if number != 2:
            backend.read(number, 0, states(len(prompts[number])))
        return backend.prepare(number, CHAIN[number % 2 :], [2, 1], 3)

    check_company(backend, begin, len(prompts))


def test_without_states_it_is_the_plain_backend(folder: Path) -> None:
    """The same folder drafts the same tokens, in rounds that hit and rounds that do not."""
    plain = MlxBackend(folder, 4)
    for _ in plain.open(1, PROMPT, Sampling()):
        pass
    reading = opened(folder, PROMPT)
    for one, other in zip(grow(plain), grow(reading), strict=True):
        assert (one.outcomes, one.tokens) == (other.outcomes, other.tokens)
    outcome = grow(plain)[0].outcomes[0]
    for backend in (plain, reading):
        backend.commit(1, len(PROMPT), CHAIN[: outcome.accepted + 1])
    chain = [outcome.bonus, 7, 9]
    for one, other in zip(grow(plain, chain), grow(reading, chain), strict=True):
        assert (one.outcomes, one.tokens) == (other.outcomes, other.tokens)
    check_drafts(said(plain.draft(1, 30, 3)), said(reading.draft(1, 30, 3)))


@pytest.mark.parametrize("order", ORDERS)
def test_when_states_come_does_not_matter(folder: Path, order: str) -> None:
    """Before or after the tokens, in any order, or again: the next draft has them all."""
    check_order(order, partial(opened, folder), PROMPT, states(len(PROMPT + CHAIN)))


def test_a_hole_is_read_alone(folder: Path) -> None:
    """Where a beginning's states never come, what follows is drafted on the rest, the same
    whenever that came; states for sequences that are not open are ignored."""
    rows = states(len(PROMPT))
    first, second = opened(folder, PROMPT), opened(folder, PROMPT)
    first.read(1, 4, rows[4:])
    second.read(1, 7, rows[7:])
    second.read(1, 4, rows[4:7])
    second.read(2, 0, rows)
    for one, other in zip(grow(first), grow(second), strict=True):
        assert (one.outcomes, one.tokens) == (other.outcomes, other.tokens)
    whole = opened(folder, PROMPT)
    whole.read(1, 0, rows)
    assert [layer.tokens for layer in grow(whole)] != [layer.tokens for layer in grow(first)]


def test_penalties_and_bans_apply(tmp_path: Path) -> None:
    """What the request rules out is not drafted, wherever the tokens before it came from."""
    folder = reading_drafter(tmp_path)
    backend = opened(folder, PROMPT)
    backend.read(1, 0, states(len(PROMPT)))
    best = grow(backend)[0].outcomes[0].bonus
    options = LogitsOptions(logit_bias=((best, -1e9),), answer_from=len(PROMPT))
    backend = opened(folder, PROMPT, Sampling(logits_options=options))
    backend.read(1, 0, states(len(PROMPT)))
    layers = grow(backend)
    assert best not in {o.bonus for o in layers[0].outcomes}
    assert all(best not in layer.tokens for layer in layers)


def test_a_short_context_drops_what_it_left_behind(tmp_path: Path) -> None:
    """States of tokens before the window are dropped, the others go to their new positions."""
    folder = reading_drafter(tmp_path)
    inner = ReadingBackend(folder, 4)
    inner.identity = inner.identity._replace(context_length=16)
    sliding = SlidingContextBackend(inner)
    tokens = [*PROMPT, *CHAIN, 31, 32, 33, 34, 35]
    for _ in sliding.open(1, tokens, Sampling()):
        pass
    rows = states(len(tokens))
    sliding.read(1, 0, rows)
    expected = opened(folder, tokens[-8:])
    expected.read(1, 0, rows[-8:])
    for one, other in zip(grow(expected), grow(sliding), strict=True):
        assert (one.outcomes, one.tokens) == (other.outcomes, other.tokens)


def test_broken_readers_are_refused(tmp_path: Path) -> None:
    """Weights that are missing or of another width are errors that name the file."""
    folder = reading_drafter(tmp_path)
    save_reader(
        folder, ReaderDescription([0], WIDTH // 2), {"fc.weight": mx.zeros((2, 2))}, mx.float16
    )
    with pytest.raises(ModelError, match=WEIGHTS):
        ReadingBackend(folder, 4)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=WEIGHTS):
        ReadingBackend(folder, 4)
