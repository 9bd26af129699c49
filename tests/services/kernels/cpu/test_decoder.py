"""Whole passes from packed weights: mlx-lm's logits, and the same bits in any company."""

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.decoding.token_tree import read_tree
from protocol.errors import NotNumbers
from protocol.messages import Sampling
from services.engine.packing import pack_pass
from services.engine.target_model import (
    list_improvements,
    prepare_plain,
    supports_packing,
    supports_trees,
)
from services.kernels.cpu.decoder import fill_only, kernel_of
from services.kernels.cpu.equip import count_packed_bytes, equip, takes
from services.kernels.cpu.program import SETS, find_program
from services.kv.budget import measure_kv
from services.kv.cache import KVStore
from services.mlx.loader import load, windows_of
from services.mlx.taps import Taps
from services.runtime.preparation import run_all
from services.sampling.device import choose
from tests.support.reference import for_the_cpu, reference, tiny_folder
from tests.support.tiny_models import write_tiny_model

pytestmark = [
    for_the_cpu,
    pytest.mark.skipif(find_program() is None, reason="there is no C compiler here"),
]

FAMILIES = (
    "llama", "llama3", "qwen2", "qwen3", "quantized", "sliding", "gemma2", "gemma3", "phi3"
)  # fmt: skip
PROMPT = [(5 * i) % 250 + 4 for i in range(30)]
ROWS = [(7 * i) % 250 + 4 for i in range(11)]


@cache
def model(family: str, *, rounds: bool = True) -> Any:
    found = load(tiny_folder(family), as_stored=takes).module
    assert equip(found, rounds=rounds)
    assert kernel_of(found) is not None
    return found


def begun(module: Any, prompt: list[int] = PROMPT) -> KVStore:
    store = KVStore(windows_of(module), bucketed=False)
    if prompt:
        store.chain(len(prompt))
        fill_only(module)(mx.array([prompt]), cache=store.caches)
    return store


def logits(module: Any, store: KVStore, tokens: list[int]) -> Any:
    """[tokens, vocabulary] behind what is in the store."""
    store.chain(len(tokens))
    return np.array(module(mx.array([tokens]), cache=store.caches)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_with_float_activations_the_logits_are_mlx_lms(family: str) -> None:
    """Of a prompt and of tokens behind it."""
    ours = logits(model(family, rounds=False), begun(model(family, rounds=False)), ROWS)
    theirs = reference(family).rows([PROMPT + ROWS])[0][len(PROMPT) :]
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_in_any_company(family: str) -> None:
    """One by one, in pieces, as a prompt, in a tree, beside another sequence: the same logits."""
    module = model(family)
    expected = logits(module, begun(module), ROWS)
    store = begun(module, [])
    one_by_one = [logits(module, store, [token]) for token in PROMPT + ROWS]
    assert np.array_equal(np.concatenate(one_by_one[len(PROMPT) :]), expected)
    store = begun(module, PROMPT[:13])
    pieces = [logits(module, store, part) for part in (PROMPT[13:], ROWS[:3], ROWS[3:])]
    assert np.array_equal(np.concatenate(pieces[1:]), expected)
    store = begun(module)
    # A chain whose every token has a sibling that it does not see.
    nodes = [ROWS[0], *(token for pair in zip(ROWS[1:], PROMPT, strict=False) for token in pair)]
    parents = [0, 0, *(parent for at in range(1, len(nodes) - 2, 2) for parent in (at, at))]
    store.append_tree(read_tree(nodes, parents[: len(nodes) - 1]))
    tree = np.array(module(mx.array([nodes]), cache=store.caches)[0])
    assert np.array_equal(tree[[0, *range(1, len(nodes), 2)]], expected)


@pytest.mark.parametrize("family", ["quantized", "gemma3"])
def test_sequences_that_share_a_pass_change_no_bit(family: str) -> None:
    """Each gets what it gets alone."""
    module = model(family)
    assert run_all(supports_packing(module, lambda: begun(module, [])))
    stores = [begun(module), begun(module, PROMPT[:7])]
    for store in stores:
        store.chain(3)
    with pack_pass(stores, in_batches=False) as caches:
        rows = np.array(module(mx.array([ROWS[:6]]), cache=caches)[0])
    alone = [
        logits(module, begun(module), ROWS[:3]),
        logits(module, begun(module, PROMPT[:7]), ROWS[3:6]),
    ]
    assert np.array_equal(rows, np.concatenate(alone))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_holds_by_construction_is_not_tried(family: str) -> None:
    """A target shares passes and takes trees at once; trials would find the same."""
    target = prepare_plain(model(family))
    assert not list(list_improvements(target))
    for trial in (supports_packing, supports_trees):
        assert run_all(trial(target.verify, target.states.make))


@pytest.mark.parametrize("family", ["quantized", "gemma2", "gemma3"])
def test_all_instruction_sets_compute_the_same_bits(family: str) -> None:
    """Norms, rotations, attention, gates and soft caps as well as products."""
    module = model(family)
    kernel = kernel_of(module)
    assert kernel is not None
    expected = logits(module, begun(module), ROWS)
    for name in SETS:
        if (program := find_program(name)) is not None:
            kernel._program = program
            assert np.array_equal(logits(module, begun(module), ROWS), expected), name
    fastest = find_program()
    assert fastest is not None
    kernel._program = fastest


def test_layers_can_be_read_without_a_change_of_bits() -> None:
    """Taps get each layer's states of all rows, of a prompt in pieces, too."""
    module = load(tiny_folder("llama"), as_stored=takes).module
    equip(module)
    expected = logits(module, begun(module), ROWS)
    taps = Taps(module, [0, 1])
    store = begun(module)
    assert [state.shape[1] for state in taps.take()] == [len(PROMPT)] * 2
    assert np.array_equal(logits(module, store, ROWS), expected)
    assert [state.shape[1] for state in taps.take()] == [len(ROWS)] * 2


def test_weights_take_what_they_take_in_the_file() -> None:
    """Four bits, and a scale and a bias for each group; nothing is kept beside them."""
    module = model("quantized")
    stored = sum(path.stat().st_size for path in tiny_folder("quantized").glob("*.safetensors"))
    assert count_packed_bytes(module) < 1.3 * stored


def test_fewer_bits_stay() -> None:
    """As in the file: rounding four bits to eight would only make them larger."""
    module = load(tiny_folder("quantized"), as_stored=takes).module
    assert equip(module, bits=8)
    assert count_packed_bytes(module) == count_packed_bytes(model("quantized"))


@pytest.mark.parametrize("family", ["dynamic", "gemma4", "moe"])
def test_other_families_stay_with_mlx(family: str) -> None:
    """Their weights are floats, as before."""
    module = load(tiny_folder(family), as_stored=takes).module
    assert not equip(module)
    assert kernel_of(module) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers_end_with_a_sentence(bad: float, tmp_path: Path) -> None:
    """In a scale, in norms, in front of capped logits, greedily and with noise."""
    for family, name in (
        ("quantized", "model.layers.1.mlp.down_proj.scales"),
        ("llama", "model.norm.weight"),
        ("gemma2", "model.norm.weight"),
    ):
        folder = write_tiny_model(tmp_path / f"{family}-{bad}", family)
        weights: Any = mx.load(str(folder / "model.safetensors"))
        broken = np.array(weights[name])
        broken.reshape(-1)[3] = bad
        weights[name] = mx.array(broken)
        mx.eval(weights)
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        module = load(folder, as_stored=takes).module
        assert equip(module, bits=8)
        rows = mx.array(logits(module, begun(module), ROWS[:2]))
        for sampling in (Sampling(), Sampling(temperature=0.8, seed=1)):
            with pytest.raises(NotNumbers, match="NaN or infinite"):
                choose(rows, [30, 31], sampling)


def test_keys_that_no_half_holds_end_with_a_sentence(tmp_path: Path) -> None:
    """Also where their scores would be so small that softmax hid them."""
    for sign in (1, -1):
        folder = write_tiny_model(tmp_path / str(sign), "qwen2")
        weights: Any = mx.load(str(folder / "model.safetensors"))
        bias = np.array(weights["model.layers.0.self_attn.k_proj.bias"])
        bias[3] = sign * 1e5
        weights["model.layers.0.self_attn.k_proj.bias"] = mx.array(bias)
        stored = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
        mx.save_safetensors(str(folder / "model.safetensors"), stored, {"format": "mlx"})
        module = load(folder, as_stored=takes).module
        assert equip(module)
        with pytest.raises(NotNumbers, match="NaN or infinite"):
            choose(mx.array(logits(module, begun(module), ROWS[:2])), [30, 31], Sampling())


@pytest.mark.parametrize(("family", "dtype"), [("quantized", mx.float16), ("gemma3", mx.float32)])
def test_keys_and_values_keep_their_type_wherever_they_go(family: str, dtype: mx.Dtype) -> None:
    """Halves, unless weights are wider; forks and dumps go on, and memory counts their bytes."""
    module = model(family)
    kernel = kernel_of(module)
    assert kernel is not None
    expected, store = logits(module, begun(module), ROWS), begun(module)
    fork, copy = store.fork(len(PROMPT)), KVStore(windows_of(module), bucketed=False)
    dump = store.dump(len(PROMPT))
    copy.load(dump)
    for state in (fork, copy, store):
        assert np.array_equal(logits(module, state, ROWS), expected)
    assert {array.dtype for array in [*dump.values(), *store.arrays]} == {dtype}
    size = measure_kv(module, lambda: KVStore(windows_of(module), bucketed=False))
    assert size.per_token == 2 * dtype.size * len(store.caches) * kernel.kv_heads * kernel.size


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    """It would be read from somewhere else."""
    module = model("llama")
    store = begun(module)
    store.chain(1)
    with pytest.raises(ValueError, match="tokens outside"):
        module(mx.array([[100000]]), cache=store.caches)
