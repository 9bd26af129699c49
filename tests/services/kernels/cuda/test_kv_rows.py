"""Keys and values written where they belong: on the host, and on CUDA in whole passes."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from protocol.decoding.token_tree import read_tree
from services.engine.batch import BatchArrays
from services.engine.packing import enable_packing
from services.engine.traced_forward import TracedForward
from services.kernels.cuda import blocks, kv_rows
from services.kernels.cuda.blocks import BlockKernels, can_write_in_place, route_through
from services.kernels.cuda.choice import in_trace, use_products
from services.kernels.cuda.kv_rows import (
    KVBuffers,
    TracedLayer,
    find_written,
    wait_for,
    writes_in_place,
)
from services.kernels.cuda.rotate import Heads
from services.kv.cache import KVStore
from services.mlx.fused_linear import fuse_linears
from services.mlx.loader import load, windows_of
from services.mlx.patches import install as install_patches
from services.runtime.preparation import run_all
from tests.services.kernels.cuda.host import compile_kernel, run_kernel, write_rows
from tests.services.kernels.cuda.test_blocks import Kernels, equip, install
from tests.support.reference import tiny_folder
from tests.support.tiny_models import write_tiny_model

HEADS, SIZE, ROWS, SLOTS = 3, 8, 4, 16
PLACES = [9, 2, 11, 3]
PROMPT = [token % 64 for token in range(20)]
cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernel") / "rows"
    return compile_kernel("kv_rows_host.cpp", path, HEADS=HEADS, SIZE=SIZE)


def test_each_row_goes_to_its_slot(program: Path) -> None:
    """Of rows whose heads stand side by side; what stands in other slots stays."""
    random = np.random.default_rng(1)
    rows = random.normal(size=(ROWS, HEADS, SIZE)).astype(np.float32)
    buffer = random.normal(size=(HEADS, SLOTS, SIZE)).astype(np.float32)
    found = run_kernel(program, ROWS, SLOTS, -1, PLACES, buffer, rows)
    buffer[:, PLACES] = rows.swapaxes(0, 1)
    np.testing.assert_allclose(found.reshape(buffer.shape), buffer, rtol=1e-6)


@pytest.mark.parametrize(("slots", "to"), [([5, 6, 9], 3), ([4], 4), ([3, 4, 5, 8], 2)])
def test_rows_move_together_though_they_overlap(program: Path, slots: list[int], to: int) -> None:
    buffer = np.random.default_rng(2).normal(size=(HEADS, SLOTS, SIZE)).astype(np.float32)
    found = run_kernel(program, len(slots), SLOTS, to, slots, buffer)
    buffer[:, to : to + len(slots)] = buffer[:, slots]
    np.testing.assert_allclose(found.reshape(buffer.shape), buffer, rtol=1e-6)


def test_nothing_is_written_in_place_elsewhere_than_on_cuda() -> None:
    buffer = mx.zeros((1, HEADS, SLOTS, SIZE), mx.float16)
    assert writes_in_place(buffer, buffer) is mx.cuda.is_available()
    assert not writes_in_place(buffer.astype(mx.float32), buffer.astype(mx.float32))


def test_queries_wait_without_being_changed() -> None:
    queries = mx.arange(4.0)
    assert wait_for(None, queries) is queries
    assert wait_for(mx.zeros(1), queries).tolist() == queries.tolist()


def test_attention_begins_when_the_rows_are_written() -> None:
    """Whoever computes it: its queries are made of what says so, which is a zero on a device."""
    module = load(tiny_folder("llama")).module
    enable_packing(module)
    home: Any = sys.modules[type(module.model.layers[0]).__module__]
    queries, keys = (mx.random.normal((1, 2, 3, 8), key=mx.random.key(seed)) for seed in (1, 2))
    mask, cache = mx.ones((3, 3), mx.bool_), SimpleNamespace(is_traced=True, pending=None)

    def attend(queries: mx.array, pending: mx.array | None) -> Any:
        cache.pending = pending
        how = {"cache": cache, "scale": 0.3, "mask": mask}
        return np.array(home.scaled_dot_product_attention(queries, keys, keys, **how))

    expected = attend(queries + 0.5, None)
    np.testing.assert_allclose(attend(queries, mx.array([0.5])), expected, atol=1e-5)


def test_all_layers_are_written_in_place_or_none() -> None:
    layer = mx.zeros((1, HEADS, SLOTS, SIZE))
    batch, one = BatchArrays(mx.array([[5]]), mx.array([3])), mx.ones(1)
    layers = [TracedLayer(layer, layer, batch) for _ in range(2)]
    assert find_written(layers) == []
    layers[1].written = one
    with pytest.raises(ValueError, match="1 of 2 layers"):
        find_written(layers)
    layers[0].written = one
    assert [each is one for each in find_written(layers)] == [True, True]


@pytest.mark.parametrize("ours", [True, False], ids=["our blocks", "MLX's"])
def test_a_pass_that_writes_in_place_sees_its_own_rows(
    monkeypatch: pytest.MonkeyPatch, *, ours: bool
) -> None:
    """Beside a pass that MLX stores; the buffers are those that it was given."""
    module = load(tiny_folder("llama")).module
    enable_packing(module)
    expected, layers = run_rows(module)
    stand_in = install(monkeypatch, Kernels())
    monkeypatch.setattr(kv_rows, "writes_in_place", lambda *_: True)
    monkeypatch.setattr(kv_rows, "write", write_rows)

    def rotate_into(x: mx.array, positions: mx.array, layer: Heads, into: KVBuffers) -> mx.array:
        queries, keys, values = stand_in.rotate(x, positions, layer)
        write_rows(into, keys, values)
        return queries

    monkeypatch.setattr(blocks, "rotate_into", rotate_into)
    if ours:
        equip(module)
    assert can_write_in_place(module) is ours
    with in_trace():
        found, written = run_rows(module, owned=True)
    assert all(layer.written is not None for layer in written)
    assert (stand_in.calls.count("rotate") > 0) is ours
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=2e-4)
    for own, other in zip(written, layers, strict=True):
        np.testing.assert_allclose(np.array(own.keys), np.array(other.keys), atol=2e-4)
        np.testing.assert_allclose(np.array(own.values), np.array(other.values), atol=2e-4)


def run_rows(module: Any, *, owned: bool = False) -> tuple[mx.array, list[TracedLayer]]:
    """Logits of three rows side by side behind random ones, and the layers."""
    attention = module.model.layers[0].self_attn
    shape = (1, attention.n_kv_heads, 64, attention.o_proj.weight.shape[1] // attention.n_heads)
    seen = mx.arange(64)[None] <= mx.array([[9], [10], [10]])
    seen &= (mx.arange(64)[None] != 10) | (mx.arange(3)[:, None] == 1)
    batch = BatchArrays(mx.array([[5, 6, 7]]), mx.array(9), mx.array([9, 10, 10]), seen)
    keys = iter(mx.random.split(mx.random.key(7), 2 * len(module.model.layers)))
    pairs = [[mx.random.normal(shape, key=next(keys)) for _ in "kv"] for _ in module.model.layers]
    layers = [TracedLayer(*pair, batch, owned=owned) for pair in pairs]
    logits: mx.array = module(batch.tokens, cache=layers)
    mx.eval(logits)
    return logits, layers


class OnDevice:
    """A small model on CUDA whose blocks go through our kernels, however fast they are."""

    def __init__(self, folder: Path, most_rows: int) -> None:
        config = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4}
        module = load(write_tiny_model(folder, "llama", config=config)).module
        module.set_dtype(mx.float16)
        enable_packing(module)
        self.plain = module
        fuse_linears(module)
        assert run_all(use_products(module)) is not None
        few = module.model.layers[0].self_attn.o_proj.few_rows
        few.least, few.most = 1, most_rows
        install_patches(route_through(layer, BlockKernels(layer)) for layer in module.model.layers)
        self.traced = TracedForward(module)

    def prompt(self) -> KVStore:
        """A sequence whose buffers have room for more."""
        store = KVStore(windows_of(self.plain), bucketed=True)
        store.chain(len(PROMPT))
        mx.eval(self.plain(mx.array([PROMPT]), cache=store.caches))
        return store

    def begin(self, store: KVStore, tokens: list[int]) -> mx.array:
        """[n, vocabulary] logits of a chain, under way."""
        store.chain(len(tokens))
        logits = self.traced(mx.array([tokens]), store)[0]
        mx.async_eval(logits)
        return logits

    def expect(self, tokens: list[int], count: int) -> npt.NDArray[np.float32]:
        """Of the last `count` of these tokens, by the model's own forward over them all."""
        store = KVStore(windows_of(self.plain), bucketed=True)
        store.chain(len(tokens))
        logits = self.plain(mx.array([tokens]), cache=store.caches)[0, -count:]
        return np.array(logits.astype(mx.float32))


@pytest.fixture
def on_device(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> OnDevice:
    """By our blocks, or as many rows as a parameter says."""
    return OnDevice(tmp_path / "model", getattr(request, "param", 16))


def assert_close(found: mx.array, expected: npt.NDArray[np.float32]) -> None:
    distance = np.linalg.norm(np.array(found.astype(mx.float32)) - expected)
    assert distance < 0.02 * np.linalg.norm(expected)


@cuda
@pytest.mark.parametrize("on_device", [16, 2], ids=["our blocks", "MLX's"], indirect=True)
def test_passes_that_begin_ahead_leave_the_buffers_where_they_are(on_device: OnDevice) -> None:
    """Three under way at once; each sees the rows of those before it."""
    store = on_device.prompt()
    store.own()
    before = store.caches[0].keys
    tokens, found = list(PROMPT), list[Any]()
    for chain in ([7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17, 18]):
        tokens += chain
        found.append((on_device.begin(store, chain), list(tokens), len(chain)))
    assert store.written is not None
    assert store.caches[0].keys is before
    for logits, known, count in found:
        assert_close(logits, on_device.expect(known, count))


@cuda
def test_a_fork_and_its_origin_write_into_buffers_of_their_own(on_device: OnDevice) -> None:
    origin = on_device.prompt()
    fork = origin.fork(18)
    for store, length, chain in ((fork, 18, [40, 41]), (origin, 20, [50, 51, 52])) * 2:
        store.trim(length)
        assert_close(
            on_device.begin(store, chain), on_device.expect(PROMPT[:length] + chain, len(chain))
        )


@cuda
def test_rows_are_written_though_nobody_looks_at_the_logits(on_device: OnDevice) -> None:
    store = on_device.prompt()
    store.chain(3)
    on_device.traced(mx.array([[30, 31, 32]]), store)  # not launched
    assert_close(
        on_device.begin(store, [33, 34]), on_device.expect([*PROMPT, 30, 31, 32, 33, 34], 2)
    )


@cuda
def test_a_tree_s_rows_go_behind_the_text(on_device: OnDevice) -> None:
    """And a path of them stands, moved together."""
    store = on_device.prompt()
    tree = read_tree([5, 9, 3, 11, 4], [0, 0, 1, 2])
    store.append_tree(tree)
    mx.async_eval(on_device.traced(mx.array([tree.tokens]), store))
    store.commit_rows([0, 2, 4])
    assert_close(on_device.begin(store, [6, 7]), on_device.expect([*PROMPT, 5, 3, 4, 6, 7], 2))
