"""Decoder blocks by our own kernels: what MLX gives, and the same bits in any company."""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from protocol.decoding.token_tree import read_tree
from services.batching.packing import enable_packing, pack_caches
from services.kv.cache import KVStore, windows_of
from services.mlx.few_rows.blocks import use_blocks
from services.mlx.loader import load
from services.mlx.rope import use_tables
from tests.services.mlx.few_rows.passes import PROMPT, ROWS, begun, logits
from tests.support.reference import for_the_cpu, tiny_folder
from tests.support.tiny_models import write_adapter, write_tiny_model

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="macOS has MLX's Metal kernels"),
    for_the_cpu,
]

FAMILIES = ["llama", "llama3", "linear", "sliding", "qwen2", "qwen3", "yarn", "quantized"]


def module(family: str) -> Any:
    """A model as the services prepare it, but for the blocks."""
    found = load(tiny_folder(family)).module
    use_tables(found)
    return found


def with_blocks(family: str) -> Any:
    found = module(family)
    assert use_blocks(found) == len(found.layers)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_model(family: str) -> None:
    """Up to rounding, behind a prompt and from the first token on."""
    plain, ours = module(family), with_blocks(family)
    for prompt in ([], PROMPT):
        stores = [begun(model, prompt) for model in (plain, ours)]
        expected, found = (
            logits(model, store, ROWS) for model, store in zip((plain, ours), stores, strict=True)
        )
        np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_in_any_company(helpers: int, family: str) -> None:
    model = with_blocks(family)
    together = logits(model, begun(model), ROWS)
    for size in (1, 3, 7):
        store = begun(model)
        parts = [logits(model, store, ROWS[at : at + size]) for at in range(0, len(ROWS), size)]
        np.testing.assert_array_equal(np.concatenate(parts), together)


def test_a_row_of_a_tree_has_the_bits_of_a_chain() -> None:
    model = with_blocks("llama")
    tree = read_tree([9, 20, 21, 22, 23], [0, 0, 1, 2])
    store = begun(model)
    store.append_tree(tree)
    found = np.array(model(mx.array([tree.tokens]), cache=store.caches)[0])
    for path in ([0, 1, 3], [0, 2, 4]):
        chain = logits(model, begun(model), [tree.tokens[row] for row in path])
        np.testing.assert_array_equal(found[path], chain)


def test_sequences_that_share_a_pass_have_the_bits_they_have_alone() -> None:
    model = with_blocks("sliding")
    enable_packing(model)
    alone = [logits(model, begun(model, PROMPT[:n]), ROWS[:m]) for n, m in ((30, 3), (12, 5))]
    stores = [begun(model, PROMPT[:n]) for n in (30, 12)]
    for store, count in zip(stores, (3, 5), strict=True):
        store.chain(count)
    row = mx.array([ROWS[:3] + ROWS[:5]])
    together = np.array(model(row, cache=pack_caches(stores))[0])
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_keys_and_values_are_written_where_they_are() -> None:
    """A pass copies no buffer, and a fork never sees what its origin writes later."""
    model = with_blocks("llama")
    store = begun(model)

    def places() -> list[int]:
        mx.eval(store.arrays)
        return [np.array(array, copy=False).ctypes.data for array in store.arrays]

    logits(model, store, ROWS[:2])
    before = places()
    logits(model, store, ROWS[2:5])
    assert places() == before
    fork = store.fork(len(PROMPT) + 2)
    logits(model, store, [9, 9, 9])
    store.trim(len(PROMPT) + 2)
    logits(model, store, [8, 8, 8])
    np.testing.assert_array_equal(
        logits(model, fork, ROWS[2:]), logits(model, begun(model), ROWS)[2:]
    )


def test_many_rows_stay_mlx_own() -> None:
    """A prompt's pass is what it was, bit for bit; so is one without a cache."""
    plain, ours = module("llama"), with_blocks("llama")
    found, expected = (
        logits(model, KVStore(windows_of(model), bucketed=False), PROMPT) for model in (ours, plain)
    )
    np.testing.assert_array_equal(found, expected)
    few = mx.array([ROWS])
    np.testing.assert_array_equal(np.array(ours(few)), np.array(plain(few)))


def test_positions_far_out() -> None:
    """The angles are there wherever a sequence is."""
    plain, ours = module("llama"), with_blocks("llama")
    found = []
    for model in (plain, ours):
        store = begun(model)
        visible = np.ones((2, 32), np.bool_)
        store.branches(30, np.array([*range(30), 3000, 70_000]), visible)
        found.append(np.array(model(mx.array([[8, 9]]), cache=store.caches)))
    np.testing.assert_allclose(found[1], found[0], atol=2e-4 * np.abs(found[0]).max())


def test_layers_that_do_not_rotate(tmp_path: Path) -> None:
    """SmolLM3's: every second one has no RoPE."""
    config = {"model_type": "smollm3", "no_rope_layer_interval": 2}
    folder = write_tiny_model(tmp_path / "model", "llama", config=config)
    plain, ours = (load(folder).module for _ in range(2))
    for model in (plain, ours):
        use_tables(model)
    assert use_blocks(ours) == len(ours.layers)
    expected, found = (logits(model, begun(model), ROWS) for model in (plain, ours))
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("family", ["gemma2", "dynamic", "moe", "glm4"])
def test_other_blocks_stay_mlx_own(family: str) -> None:
    assert use_blocks(module(family)) == 0


def test_layers_with_adapters_stay_mlx_own(tmp_path: Path) -> None:
    folder = tiny_folder("llama")
    adapter = write_adapter(tmp_path / "adapter", folder)
    model = load(folder, adapter=str(adapter)).module
    use_tables(model)
    used = use_blocks(model)
    adapted = sum("lora_a" in str(dict(layer.parameters())) for layer in model.layers)
    assert adapted
    assert used == len(model.layers) - adapted


def test_what_computes_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(self: Any, x: mx.array) -> mx.array:
        found: mx.array = self.down_proj(self.gate_proj(x) * self.up_proj(x))
        return found

    monkeypatch.setattr(llama.MLP, "__call__", doubled)
    assert use_blocks(module("llama")) == 0


def test_without_kernels_all_is_mlx_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.mlx.few_rows.blocks.cpu_kernels", lambda: None)
    assert use_blocks(module("llama")) == 0
