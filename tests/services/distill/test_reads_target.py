"""A drafter that reads the target: what it is given in training, and what it makes of it."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.errors import ModelError
from protocol.settings import READING_WAYS
from services.distill.context import (
    LONGEST,
    SHORTEST,
    Blocks,
    ContextCache,
    context_caches,
    context_of,
    cut,
    even_blocks,
    logits_in_context,
    random_blocks,
)
from services.distill.phases import distill
from services.distill.student import spread_layers
from services.mlx.loader import load
from services.mlx.target_reader import TargetReader, load_reader, new_reader
from tests.services.distill.test_training import Quiet, settings_for
from tests.support.reading import feed_loudly
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("t"), "llama")


def test_blocks_are_as_long_as_a_round() -> None:
    """Lags count from 1 to at most the longest block; some sequences have no states at all."""
    blocks = random_blocks(200, 64, np.random.default_rng(0))
    unread = blocks.read_from == 64
    assert 5 < unread.sum() < 40
    assert (blocks.starts[unread] == 0).all()
    whole = blocks.lags[blocks.read_from == 0]
    assert whole.min() == 1
    assert SHORTEST <= whole[:, LONGEST:].max() <= LONGEST


def test_a_token_sees_states_before_its_block_and_tokens_in_it() -> None:
    """With blocks of 3, token 4 sees states 0 to 2 and tokens 3 and 4."""
    blocks = even_blocks(1, 6, 3, 0)
    visible = np.array(context_of(mx.zeros((1, 6, 4)), blocks).visible)[0, 0]
    assert np.flatnonzero(visible[4]).tolist() == [0, 1, 2, 6 + 3, 6 + 4]
    late = cut(np.array([[3]]), np.array([[0]]), np.array([2]), 6)
    visible = np.array(context_of(mx.zeros((1, 6, 4)), late).visible)[0, 0]
    assert np.flatnonzero(visible[5]).tolist() == [2, 6, 7, 6 + 3, 6 + 4, 6 + 5]
    assert np.flatnonzero(visible[1]).tolist() == [6, 7]


def test_without_states_it_is_the_plain_drafter(target: Path) -> None:
    """Blocks that show no states leave the logits of an ordinary causal pass."""
    module = load(target).module
    reader = new_reader(8, module)
    tokens = mx.array([[5, 9, 200, 31, 7]])
    blocks = Blocks(np.zeros((1, 5), np.int32), np.array([5], np.int32))
    context = context_of(mx.random.normal((1, 5, 8)), blocks)
    found = module(tokens, cache=context_caches(module, reader, context))
    np.testing.assert_allclose(np.array(found), np.array(module(tokens)), atol=1e-4)


def test_its_own_output_takes_the_place_of_missing_states(target: Path) -> None:
    """As many passes as a block is long give what feeding token by token gives; fewer do not,
    and where no state is known nothing is added."""
    module = load(target).module
    reader = feed_loudly(new_reader(8, module, "input"))
    tokens, count = mx.array([[5, 9, 200, 31, 7, 44, 18, 90]]), 8
    features = mx.random.normal((1, count, 8), key=mx.random.key(1))
    every = (tokens, mx.arange(count))
    context = context_of(features, even_blocks(1, count, 4, 0))
    found = logits_in_context(module, reader, context, every, 4)
    np.testing.assert_allclose(
        np.array(found), by_token(module, reader, features, tokens, 4), atol=1e-4
    )
    fewer = np.array(logits_in_context(module, reader, context, every, 2))
    np.testing.assert_allclose(fewer[:6], np.array(found)[:6], atol=1e-4)
    assert np.abs(fewer[7] - np.array(found)[7]).max() > 1e-3
    alone = context_of(features, Blocks(np.zeros((1, 8), np.int32), np.array([8], np.int32)))
    plain = np.array(module(tokens)[0])
    np.testing.assert_allclose(
        np.array(logits_in_context(module, reader, alone, every, 4)), plain, atol=1e-4
    )


def by_token(
    module: Any, reader: TargetReader, features: mx.array, tokens: mx.array, size: int
) -> Any:
    """Logits of a drafter that reads, one token after the other, in blocks of `size`."""
    blocks, count = even_blocks(1, tokens.shape[1], size, 0), tokens.shape[1]
    visible = context_of(features, blocks).visible
    table, added, found = module.model.embed_tokens, list[mx.array](), []
    nothing = hidden = mx.zeros((1, 1, table.weight.shape[1]))
    for place in range(count):
        start, upto = int(blocks.starts[0, place]), slice(place + 1)
        if start == 0:
            added.append(nothing)
        elif start == place:
            added.append(reader.after_state(features[:, place - 1 : place]))
        else:
            added.append(reader.after_own(hidden[:, -1:]))
        shown = mx.concatenate(
            [visible[:, :, upto, upto], visible[:, :, upto, count:][..., upto]], -1
        )
        keys = reader.rows(module, features[:, upto], 0)
        caches = [ContextCache(k, v, shown) for k, v in keys]
        embedded = table(tokens[:, upto]) + mx.concatenate(added, axis=1)
        hidden = module.model(tokens[:, upto], cache=caches, input_embeddings=embedded)
        found.append(np.array(table.as_linear(hidden[:, -1])[0]))
    return np.stack(found)


@pytest.mark.parametrize("way", READING_WAYS)
@pytest.mark.wide
def test_training_teaches_it_to_read(target: Path, tmp_path: Path, way: str) -> None:
    """The loss falls, the reader's own weights move, and the figures count lags."""
    settings = settings_for(target, tmp_path / "out", reads_target=way, layers=1)
    control = Quiet()
    distill(settings, control)
    figures: Any = control.finished.figures["figures"]
    assert len(figures["by_lag"]) == 8
    report = json.loads((tmp_path / "out" / "distill.json").read_text())
    log = [entry for entry in report["log"] if entry["objective"] == "ce"]
    assert log[-1]["loss"] < log[0]["loss"]
    drafter = load(tmp_path / "out")
    found = load_reader(tmp_path / "out", mx.float32)
    assert found is not None
    description, reader = found
    assert description.layers == spread_layers(3)
    layer = drafter.module.model.layers[0]
    own = layer.self_attn.k_proj.weight * layer.input_layernorm.weight
    assert float(mx.abs(reader.k_proj[0].weight - own).max()) > 1e-3
    assert description.way == way
    if way == "input":
        moved = [reader.from_state.proj.weight, reader.from_own.proj.weight]
        assert min(float(mx.abs(weight).max()) for weight in moved) > 1e-3


def test_a_drafter_grows_from_one_of_fewer_layers(tmp_path: Path) -> None:
    """It begins as that drafter: the layers between its first and its last ones add nothing."""
    target = write_tiny_model(tmp_path / "target", "llama", layers=6)
    small = settings_for(target, tmp_path / "small", layers=3, steps=3, precision="float32")
    distill(small, Quiet())
    grown = settings_for(
        target, tmp_path / "grown", layers=5, steps=1, learning_rate=1e-12, precision="float32",
        init_drafter=str(tmp_path / "small"),
    )  # fmt: skip
    distill(grown, Quiet())
    tokens = mx.array([[5, 9, 2, 30, 7, 11]])
    few, more = (load(tmp_path / name).module for name in ("small", "grown"))
    assert (len(few.layers), len(more.layers)) == (3, 5)
    np.testing.assert_allclose(np.array(more(tokens)), np.array(few(tokens)), atol=1e-2)
    assert np.abs(np.array(more.layers[2].self_attn.q_proj.weight)).max() > 0


@pytest.mark.parametrize("layers", [1, 3])
def test_a_drafter_of_other_layers_is_refused(target: Path, tmp_path: Path, layers: int) -> None:
    """One of more layers does not fit; one that reads the target does not grow."""
    first = settings_for(target, tmp_path / "a", reads_target="states", layers=2, steps=1)
    distill(first, Quiet())
    again = settings_for(
        target, tmp_path / "b", layers=layers, steps=1, init_drafter=str(tmp_path / "a")
    )
    with pytest.raises(ModelError, match="give --layers 2"):
        distill(again, Quiet())


def test_a_drafter_can_be_trained_further(target: Path, tmp_path: Path) -> None:
    """`init_drafter` starts from a drafter's own weights: no step leaves them as they were."""
    first = settings_for(target, tmp_path / "a", reads_target="states", layers=2, steps=3)
    distill(first, Quiet())
    again = settings_for(
        target, tmp_path / "b", reads_target="states", layers=2, steps=1, learning_rate=1e-12,
        init_drafter=str(tmp_path / "a"),
    )  # fmt: skip
    distill(again, Quiet())
    for name in ("model.safetensors", "reads_target.safetensors"):
        one: Any = mx.load(str(tmp_path / "a" / name))
        other: Any = mx.load(str(tmp_path / "b" / name))
        for key, array in one.items():
            np.testing.assert_allclose(np.array(other[key]), np.array(array), atol=1e-3)
