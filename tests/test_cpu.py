"""Tuning for the CPU rearranges a model and changes nothing that it computes."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest

from services.cpu import _times, tune
from services.model import load
from services.rope import TableRope
from tests.reference import tiny_folder
from tests.tiny_models import FAMILIES, write_tiny_model

ROWS = [1, 2, 3, 4, 7, 8, 9, 20]


def tokens_of(count: int) -> mx.array:
    return mx.array(np.random.default_rng(count).integers(0, 280, (1, count)))


def logits_of(module: Any) -> list[npt.NDArray[np.float32]]:
    return [np.array(module(tokens_of(count), cache=None)) for count in ROWS]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_equal(family: str) -> None:
    """For every number of rows, of every architecture, to within rounding."""
    module = load(tiny_folder(family)).module
    expected = logits_of(module)
    tune(module)
    for before, after in zip(expected, logits_of(module), strict=True):
        scale = np.abs(before).max()
        np.testing.assert_allclose(before, after, atol=1e-5 * scale)


@pytest.mark.parametrize("family", ["llama", "sliding", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_tied_embeddings_stay_exact(family: str) -> None:
    """A tied table is stored transposed; its rows come out as they were, for ids of any shape."""
    module = load(tiny_folder(family)).module
    before = module.model.embed_tokens
    tune(module)
    after = module.model.embed_tokens
    assert type(after) is not type(before)
    height = before.weight.shape[0]
    for ids in (mx.arange(height), mx.array([[7]]), mx.array([[3, 3], [0, height - 1]])):
        np.testing.assert_array_equal(np.array(before(ids)), np.array(after(ids)))
        assert after(ids).dtype == before(ids).dtype
    assert "lm_head" not in module


@pytest.mark.parametrize("family", ["llama3", "glm4"])
def test_a_head_of_its_own_is_rearranged(family: str) -> None:
    """An untied head is stored transposed, and the embedding stays as it is."""
    module = load(tiny_folder(family)).module
    embedding, weight = module.model.embed_tokens, module.lm_head.weight
    tune(module)
    assert module.model.embed_tokens is embedding
    assert module.lm_head.weight.shape == weight.shape[::-1]
    np.testing.assert_array_equal(np.array(weight.T), np.array(module.lm_head.weight))


@pytest.mark.parametrize("family", ["llama3", "qwen2", "gemma2"])
def test_wide_layers_compute_the_same(family: str, tmp_path: Path) -> None:
    """Nor does it matter how much wider than its input a layer is."""
    config = {"intermediate_size": 320}
    module = load(write_tiny_model(tmp_path / "m", family, config=config)).module
    expected = logits_of(module)
    tune(module)
    for before, after in zip(expected, logits_of(module), strict=True):
        np.testing.assert_allclose(before, after, atol=1e-5 * np.abs(before).max())


def test_models_may_multiply_by_the_embedding_themselves(tmp_path: Path) -> None:
    """Some models take `embed_tokens.weight.T` for their tied head; it must be what it was."""
    folder = write_tiny_model(tmp_path / "m", "llama", config={"model_type": "seed_oss"})
    module = load(folder).module
    expected = logits_of(module)
    tune(module)
    for before, after in zip(expected, logits_of(module), strict=True):
        np.testing.assert_allclose(before, after, atol=1e-5 * np.abs(before).max())


@pytest.mark.parametrize("height", [10, 9000])
def test_any_number_of_rows_is_one_product(height: int) -> None:
    """However the rows are grouped, the result is the matrix product."""
    rng = np.random.default_rng(height)
    matrix = rng.standard_normal((4, height)).astype(np.float32)
    for rows in range(1, 18):
        x = rng.standard_normal((1, rows, 4)).astype(np.float32)
        found = np.array(_times(mx.array(x), mx.array(matrix)))
        np.testing.assert_allclose(x @ matrix, found, atol=1e-5)


@pytest.mark.parametrize("family", ["mamba"])
def test_unknown_shapes_stay_as_they_are(family: str) -> None:
    """A model whose parts have other names is not touched."""
    module = load(tiny_folder(family)).module
    embedding = module.backbone.embeddings
    tune(module)
    assert module.backbone.embeddings is embedding


def test_a_head_with_a_bias_stays_as_it_is() -> None:
    """The transposed head has no bias, so a head that has one is kept."""
    module = load(tiny_folder("llama3")).module
    height, width = module.lm_head.weight.shape
    module.lm_head = head = nn.Linear(width, height, bias=True)
    tune(module)
    assert module.lm_head is head


def test_sines_are_shared_by_all_layers() -> None:
    """The RoPE of every layer reads the same tables."""
    module = load(tiny_folder("llama")).module
    tune(module)
    ropes = [layer.self_attn.rope for layer in module.layers]
    assert all(isinstance(rope, TableRope) for rope in ropes)
    assert len({id(rope._tables) for rope in ropes}) == 1
