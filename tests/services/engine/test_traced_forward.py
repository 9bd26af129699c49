"""A traced forward gives the model's own logits wherever it is replayed, or is not used."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.decoding.token_tree import read_tree
from services.engine import traced_forward
from services.engine.batch import Batch, BatchArrays, BatchPart, Shape, round_to_traced
from services.engine.packing import enable_packing
from services.engine.runner import ModelRunner
from services.engine.traced_forward import MOST_ROWS, TREE_ROWS, TracedForward
from services.kv.cache import KVStore
from services.mlx import launching, selftest
from services.mlx.loader import load, windows_of
from services.mlx.rope import allow_branches
from services.runtime.preparation import run_all
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    module = load(write_tiny_model(tmp_path_factory.mktemp("model"), "llama")).module
    allow_branches(module)
    return module


def stores_of(model: Any) -> Callable[[], KVStore]:
    """Makes empty stores for its sequences."""
    return partial(KVStore, windows_of(model), bucketed=False)


def prefill(model: Any, tokens: int) -> KVStore:
    store = stores_of(model)()
    store.chain(tokens)
    mx.eval(model(mx.arange(tokens)[None] % 200 + 1, cache=store.caches))
    return store


def _assert_same(model: Any, traced: TracedForward, own: KVStore, other: KVStore) -> None:
    """Verify three tokens on both stores, whose tokens are the same."""
    row = mx.array([[7, own.length % 100 + 1, 9]])
    own.chain(3)
    other.chain(3)
    assert traced.can_trace(other)
    expected = model(row, cache=own.caches)
    np.testing.assert_allclose(np.array(traced(row, other)), np.array(expected), atol=1e-4)


def test_a_replay_is_right_at_every_place(model: Any) -> None:
    """One trace serves all lengths of a bucket, rewound ones too, and a grown buffer."""
    traced = TracedForward(model)
    own, other = prefill(model, 5), prefill(model, 5)
    for length in (8, 9, 12, 250, 253, 256, 259):
        while own.length < length:
            count = min(16, length - own.length)
            for store in (own, other):
                store.chain(count)
                mx.eval(model(mx.arange(count)[None] + 3, cache=store.caches))
        _assert_same(model, traced, own, other)
        for store in (own, other):
            store.trim(length + 1)


def test_a_trace_leaves_out_kernels_beside_the_graph(model: Any) -> None:
    """The CPU's own attention computes at once, which no trace can hold."""
    enable_packing(model)
    test_a_replay_is_right_at_every_place(model)


def test_forks_keep_their_own_tokens(model: Any) -> None:
    """A traced pass over a fork writes nothing into the buffers that both began with."""
    traced = TracedForward(model)
    own, other = prefill(model, 20), prefill(model, 20)
    fork = other.fork(10)
    fork.chain(3)
    mx.eval(traced(mx.array([[1, 2, 3]]), fork))
    _assert_same(model, traced, own, other)


TREES = {
    "two": read_tree([5, 9, 3], [0, 0]),
    "six": read_tree([5, 9, 3, 11, 4, 7], [0, 1, 0, 1, 3]),
    "wide": read_tree(list(range(3, 20)), [0] * 16),
    "deep": read_tree(list(range(3, 35)), [max(0, row - 2) for row in range(31)]),
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_replayed_right_wherever_it_is(model: Any, name: str) -> None:
    """Padding changes no row; the path that stands is moved; a bucket's end is no border."""
    allow_branches(model)
    traced, tree = TracedForward(model), TREES[name]
    path = tree.path(len(tree) - 1)
    for length in (5, 6, 240, 251):
        own, other = prefill(model, length), prefill(model, length)
        for _ in range(2):
            for store in (own, other):
                store.append_tree(tree)
            assert traced.can_trace(other)
            tokens = mx.array(tree.tokens)[None]
            expected = np.array(model(tokens, cache=own.caches))
            np.testing.assert_allclose(np.array(traced(tokens, other)), expected, atol=1e-4)
            for store in (own, other):
                store.commit_rows(path)
            _assert_same(model, traced, own, other)


def test_trees_are_served_by_the_sizes_that_were_traced(model: Any) -> None:
    """Smaller ones are padded; another size, or a buffer that would have to grow, is not."""
    traced = TracedForward(model)
    traced.prepare(Shape(8, 256, forks=True), stores_of(model))
    for length, name, served in [(9, "six", True), (9, "two", False), (250, "six", False)]:
        store = prefill(model, length)
        store.append_tree(TREES[name])
        assert traced.serves(store) is served
    chain = prefill(model, 9)
    chain.chain(8)
    assert not traced.serves(chain)
    large = prefill(model, 9)
    large.append_tree(read_tree(list(range(1, 35)), [0] * 33))
    assert not traced.can_trace(large)


def test_a_traced_tree_in_a_fork_leaves_the_others_alone(model: Any) -> None:
    """It writes, padding included, into no buffer that another holds."""
    traced = TracedForward(model)
    own, other = prefill(model, 20), prefill(model, 20)
    fork = other.fork(10)
    fork.append_tree(TREES["six"])
    mx.eval(traced(mx.array(TREES["six"].tokens)[None], fork))
    _assert_same(model, traced, own, other)


@pytest.mark.parametrize(
    ("rows", "served"), [(1, True), (2, True), (TREE_ROWS[-1], True), (TREE_ROWS[-1] + 1, False)]
)
def test_which_chains_are_served(model: Any, rows: int, *, served: bool) -> None:
    store = prefill(model, 4)
    store.chain(rows)
    traced = TracedForward(model)
    assert traced.can_trace(store) is served
    assert not traced.serves(store)  # nobody traced this shape at load


@pytest.mark.parametrize("rows", [MOST_ROWS + 1, 16, 27])
def test_a_long_chain_goes_as_a_tree(model: Any, rows: int) -> None:
    """Its length is no shape of its own, and what comes after it finds it where it belongs."""
    allow_branches(model)
    traced = TracedForward(model)
    for length in (5, 240):
        own, other = prefill(model, length), prefill(model, length)
        for store in (own, other):
            store.chain(rows)
        tokens = mx.arange(3, 3 + rows)[None]
        assert not traced.serves(other)
        expected = np.array(model(tokens, cache=own.caches))
        np.testing.assert_allclose(np.array(traced(tokens, other)), expected, atol=1e-4)
        for store in (own, other):
            store.trim(length + rows - 2)
        _assert_same(model, traced, own, other)
    size = next(size for size in TREE_ROWS if size >= rows)
    traced.prepare(Shape(size, 256, forks=True), stores_of(model))
    store = prefill(model, 9)
    store.chain(rows)
    assert traced.serves(store)


def test_a_tree_goes_in_the_next_size_that_is_in_use(model: Any) -> None:
    traced = TracedForward(model)
    traced.tree_rows = (4, 32)
    assert [traced.pad_rows(count) for count in (3, 4, 6, 32, 33)] == [4, 4, 32, 32, 0]
    own, other = prefill(model, 9), prefill(model, 9)
    for store in (own, other):
        store.append_tree(TREES["six"])
    tokens = mx.array(TREES["six"].tokens)[None]
    expected = np.array(model(tokens, cache=own.caches))
    np.testing.assert_allclose(np.array(traced(tokens, other)), expected, atol=1e-4)
    _assert_same(model, traced, own, other)


def test_only_shapes_that_were_traced_at_load_are_served(model: Any) -> None:
    traced = TracedForward(model)
    traced.prepare(Shape(3, 256), stores_of(model))
    short, long = prefill(model, 40), prefill(model, 254)
    for store in (short, long):
        store.chain(3)
    assert traced.serves(short)
    assert not traced.serves(long)  # its buffers would have to grow
    short.trim(40)
    short.chain(2)
    assert not traced.serves(short)


@pytest.mark.parametrize("later", [True, False])
def test_a_longer_text_is_traced_when_it_comes(
    model: Any, monkeypatch: pytest.MonkeyPatch, *, later: bool
) -> None:
    """Where our kernels serve, whose shapes cost little; in buffers of few sizes."""
    monkeypatch.setattr(traced_forward, "serves_any_length", lambda _: later)
    traced = TracedForward(model)
    traced.prepare(Shape(3, 1024), stores_of(model))
    own, other = prefill(model, 1281), prefill(model, 1281)
    other.append_tree(read_tree([5, 6, 7, 8], [0, 0, 0]))
    assert not traced.serves(other)  # trees were not tried, or failed
    other.trim(1281)
    other.chain(3)
    assert traced.serves(other) is later
    other.trim(1281)
    _assert_same(model, traced, own, other)
    assert other.caches[0].keys is not None
    assert other.caches[0].keys.shape[2] == 1536
    short = prefill(model, 600)
    short.chain(3)
    assert not traced.serves(short)  # such buffers are traced at load, or never


@pytest.mark.parametrize(
    ("slots", "size"),
    [
        (1, 256),
        (257, 512),
        (1024, 1024),
        (1025, 1536),
        (4097, 5120),
        (8193, 10240),
        (16384, 16384),
        (16385, 20480),
        (32768, 32768),
        (32769, 40960),
        (131072, 131072),
        (131073, 0),
    ],
)
def test_buffers_of_traces_have_few_sizes(slots: int, size: int) -> None:
    assert round_to_traced(slots) == size


def test_a_row_of_a_trace_sees_its_window() -> None:
    rows = BatchArrays(mx.array([[7, 8]]), mx.array(5))
    seen = np.array(rows.make_mask(9, 3))
    assert [np.flatnonzero(row).tolist() for row in seen] == [[3, 4, 5], [4, 5, 6]]
    assert np.array(rows.make_mask(9, None)).sum(axis=1).tolist() == [6, 7]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_pass_that_is_waited_for_begins_before_it_is_handed_over(
    model: Any, monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    """With its first layers; behind another pass there is nothing to be gained."""
    started: list[list[mx.array]] = []
    monkeypatch.setattr(launching.mx, "async_eval", started.append)
    store = prefill(model, 20)
    store.chain(2)
    mx.eval(TracedForward(model)(mx.array([[7, 8]]), store, ahead=ahead))
    assert [len(arrays) for arrays in started] == ([] if ahead else [len(store.caches)])


def test_of_ways_that_take_turns_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first of each, which compiles, does not."""
    monkeypatch.setattr(selftest, "TURNS", 2)
    times = {"a": iter([9.0, 2.0, 3.0]), "b": iter([0.1, 5.0, 4.0])}
    asked = list[str]()

    def time_one(way: str) -> float:
        asked.append(way)
        return next(times[way])

    monkeypatch.setattr(selftest, "_time", time_one)
    ways: Any = ["a", "b"]
    assert run_all(selftest.time_in_turn(ways)) == [2.0, 4.0]
    assert asked == ["a", "b"] * 3


def test_the_runner_runs_single_sequences_by_it(model: Any) -> None:
    traced, plain = TracedForward(model), ModelRunner(model)
    traced.prepare(Shape(3, 256), stores_of(model))
    replaying, logits = ModelRunner(model, traced), []
    for one in (replaying, plain):
        store = prefill(model, 6)
        store.chain(3)
        [handle] = one.run(Batch([BatchPart(store, 3, list, [3, 4, 5])]))
        logits.append(np.array(handle.logits))
    np.testing.assert_allclose(*logits, atol=1e-4)
