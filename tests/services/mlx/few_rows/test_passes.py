"""Whole passes by one call: what the model gives, wherever keys and values come from and go to."""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.decoding.token_tree import read_tree
from services.batching.packing import enable_packing, pack_caches
from services.kv.cache import KVStore, windows_of
from services.mlx.blas import has_avx512
from services.mlx.exact_copies import add_exact_copies
from services.mlx.few_rows.blocks import use_blocks
from services.mlx.few_rows.passes import PassKernel, fill_only, use_passes
from services.mlx.lm_head import keep_rows
from services.mlx.loader import load
from services.mlx.rope import use_tables
from services.mlx.taps import Taps
from tests.services.mlx.few_rows.passes import PROMPT, ROWS, begun, logits
from tests.support.reference import for_the_cpu, tiny_folder
from tests.support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="macOS has MLX's Metal kernels"),
    for_the_cpu,
]

FAMILIES = ["llama", "llama3", "linear", "qwen2", "qwen3", "yarn", "quantized"]


def module(family: str) -> Any:
    """A model as the services prepare it, but for its passes."""
    found = load(tiny_folder(family)).module
    use_tables(found)
    assert use_blocks(found)
    return found


def with_passes(family: str = "llama") -> Any:
    found = module(family)
    assert use_passes(found)
    return found


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each pass that was one call, from now on."""
    seen, run = list[int](), PassKernel.run

    def count(self: PassKernel, tokens: mx.array, *stores: Any, **named: Any) -> mx.array:
        seen.append(tokens.size)
        return run(self, tokens, *stores, **named)

    monkeypatch.setattr(PassKernel, "run", count)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_model(family: str, calls: list[int]) -> None:
    """Up to rounding, behind a prompt and from the first token on."""
    blocks, passes = module(family), with_passes(family)
    calls.clear()
    for prompt in ([], PROMPT):
        expected, found = (logits(one, begun(one, prompt), ROWS) for one in (blocks, passes))
        close(found, expected)
    assert calls == [len(ROWS)] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_in_any_company(helpers: int, family: str) -> None:
    model = with_passes(family)
    together = logits(model, begun(model), ROWS)
    for size in (1, 3, 7):
        store = begun(model)
        parts = [logits(model, store, ROWS[at : at + size]) for at in range(0, len(ROWS), size)]
        np.testing.assert_array_equal(np.concatenate(parts), together)


def test_a_row_of_a_tree_has_the_bits_of_a_chain() -> None:
    """And so has what follows it, once its path has been moved to the trunk."""
    model = with_passes()
    tree = read_tree([9, 20, 21, 22, 23], [0, 0, 1, 2])
    for path in ([0, 1, 3], [0, 2, 4]):
        store = begun(model)
        store.append_tree(tree)
        found = np.array(model(mx.array([tree.tokens]), cache=store.caches)[0])
        chain = begun(model)
        expected = logits(model, chain, [tree.tokens[row] for row in path])
        np.testing.assert_array_equal(found[path], expected)
        store.commit_rows(path)
        np.testing.assert_array_equal(logits(model, store, [7, 8]), logits(model, chain, [7, 8]))


def test_sequences_that_share_a_pass_have_the_bits_they_have_alone(calls: list[int]) -> None:
    model = with_passes()
    enable_packing(model)
    alone = [logits(model, begun(model, PROMPT[:n]), ROWS[:m]) for n, m in ((30, 3), (12, 5))]
    stores = [begun(model, PROMPT[:n]) for n in (30, 12)]
    for store, count in zip(stores, (3, 5), strict=True):
        store.chain(count)
    calls.clear()
    row = mx.array([ROWS[:3] + ROWS[:5]])
    together = np.array(model(row, cache=pack_caches(stores))[0])
    np.testing.assert_array_equal(together, np.concatenate(alone))
    assert calls == [8]


def test_passes_of_each_kind_take_turns() -> None:
    """Few rows and many, over more tokens than a buffer has slots at first."""
    blocks, passes = module("llama"), with_passes()
    stores = [KVStore(windows_of(model), bucketed=False) for model in (blocks, passes)]
    for size in (3, 40, 1, 240, 16, 5, 300, 2):
        tokens = [(11 * i + size) % 250 + 4 for i in range(size)]
        expected, found = (
            logits(model, store, tokens)
            for model, store in zip((blocks, passes), stores, strict=True)
        )
        close(found, expected)


def test_a_fork_never_sees_what_its_origin_writes_later() -> None:
    """Nor the other way round; buffers that somebody may hold are copied before."""
    model = with_passes()
    store = begun(model)
    logits(model, store, ROWS[:2])
    held = store.caches[0].keys
    assert held is not None
    before = np.array(held)
    fork = store.fork(len(PROMPT) + 2)
    logits(model, store, [9, 9, 9])
    store.trim(len(PROMPT) + 2)
    logits(model, store, [8, 8, 8])
    rest = logits(model, begun(model), ROWS)[2:]
    np.testing.assert_array_equal(logits(model, fork, ROWS[2:]), rest)
    store.trim(len(PROMPT) + 2)
    np.testing.assert_array_equal(logits(model, store, ROWS[2:]), rest)
    np.testing.assert_array_equal(np.array(held), before)


def test_nothing_is_copied_from_one_pass_to_the_next() -> None:
    model = with_passes()
    store = begun(model)
    logits(model, store, [5])
    memory = store.resident
    logits(model, store, [6, 7])
    assert memory is not None
    assert store.resident is memory


def test_keys_and_values_alone() -> None:
    """What follows is the same as behind a pass with logits."""
    model = with_passes()
    filled, whole = begun(model), begun(model)
    filled.chain(4)
    assert fill_only(model)(mx.array([ROWS[:4]]), cache=filled.caches).shape[1] == 0
    logits(model, whole, ROWS[:4])
    np.testing.assert_array_equal(logits(model, filled, [5, 6]), logits(model, whole, [5, 6]))


def large_model(tmp_path: Path) -> Any:
    """With large weights, all of them with exact copies."""
    config = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}
    found = load(write_tiny_model(tmp_path, "llama", config=config)).module
    found.set_dtype(mx.bfloat16)
    found.set_dtype(mx.float32)
    use_tables(found)
    assert use_blocks(found)
    assert use_passes(found)
    assert add_exact_copies(found) > 0
    return found


@pytest.mark.parametrize("lengths", [(17,), (100, 1), (300,), (20, 30, 3), (48, 48), (2,) * 20])
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(
    tmp_path: Path, helpers: int, lengths: tuple[int, ...]
) -> None:
    """In whatever pieces it goes through, alone and with others."""
    if not has_avx512():
        pytest.skip("prompts go through MLX's blocks on this processor")
    model = large_model(tmp_path)
    enable_packing(model)
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in lengths]
    stores = [begun(model, PROMPT[:index]) for index, _ in enumerate(prompts)]
    for store, prompt in zip(stores, prompts, strict=True):
        store.chain(len(prompt))
    row = mx.array([[token for prompt in prompts for token in prompt]])
    caches = pack_caches(stores) if len(stores) > 1 else stores[0].caches
    assert fill_only(model)(row, cache=caches).shape[1] == 0
    for index, (store, prompt) in enumerate(zip(stores, prompts, strict=True)):
        assert store.frame.count == len(prompt)
        alone = begun(model, PROMPT[:index])
        for token in prompt:
            logits(model, alone, [token])
        np.testing.assert_array_equal(logits(model, store, ROWS), logits(model, alone, ROWS))


def test_a_tree_is_no_prompt(tmp_path: Path) -> None:
    """It goes through the model as it would without a way for prompts."""
    model = large_model(tmp_path)
    tree = read_tree(list(range(40)), [0] * 39)
    filled, whole = begun(model), begun(model)
    for store in (filled, whole):
        store.append_tree(tree)
    mx.eval(fill_only(model)(mx.array([tree.tokens]), cache=filled.caches))
    mx.eval(model(mx.array([tree.tokens]), cache=whole.caches))
    for store in (filled, whole):
        store.commit_rows([0, 5])
    np.testing.assert_array_equal(logits(model, filled, [5]), logits(model, whole, [5]))


def test_a_trimmed_head() -> None:
    """Its columns are those tokens'."""
    blocks, passes = module("llama"), load(tiny_folder("llama")).module
    ids = np.array([3, 200, 41])
    keep_rows(passes, ids)
    use_tables(passes)
    assert use_blocks(passes)
    assert use_passes(passes)
    expected = logits(blocks, begun(blocks), ROWS)
    close(logits(passes, begun(passes), ROWS), expected[:, ids])


def test_a_model_that_is_read_goes_block_by_block(calls: list[int]) -> None:
    """And in one call again when nobody reads it."""
    model = with_passes()
    taps = Taps(model, [1])
    calls.clear()
    logits(model, begun(model), ROWS)
    assert len(taps.take()) == 1
    taps.remove()
    assert calls == []
    logits(model, begun(model), ROWS)
    assert calls == [len(ROWS)]


@pytest.mark.parametrize("family", ["sliding", "gemma3"])
def test_other_models_keep_their_passes(family: str, calls: list[int]) -> None:
    """Windows that hide tokens, and blocks of other kinds."""
    model = load(tiny_folder(family)).module
    use_tables(model)
    use_blocks(model)
    use_passes(model)
    calls.clear()
    logits(model, begun(model), ROWS)
    assert calls == []


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    """The kernel would read beyond the embedding."""
    model = with_passes()
    for token in (-1, 1 << 20):
        with pytest.raises(ValueError, match="tokens outside 0"):
            logits(model, begun(model), [4, token])


def test_keys_and_values_of_half_precision_are_widened() -> None:
    """As those of another device may be."""
    model = with_passes()
    rounded, store = begun(model), begun(model)
    for one, other in zip(rounded.caches, store.caches, strict=True):
        assert one.keys is not None
        assert one.values is not None
        one.keys, one.values = one.keys.astype(mx.float16), one.values.astype(mx.float16)
        other.keys = one.keys.astype(mx.float32)
        other.values = one.values.astype(mx.float32)
    np.testing.assert_array_equal(logits(model, rounded, ROWS), logits(model, store, ROWS))
