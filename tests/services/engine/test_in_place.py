"""Traced passes that write keys and values in place, with numpy in the kernel's place.

They are built anew each time: what is compiled runs when MLX likes, and numpy writes at once.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.decoding.token_tree import read_tree
from services.engine import traced_forward
from services.engine.packing import enable_packing
from services.engine.pass_handle import PassQueue
from services.engine.runner import ModelRunner
from services.engine.target_model import find_table
from services.engine.trace import Trace
from services.engine.traced_forward import TracedForward
from services.kernels.cuda import kv_rows
from services.kv.cache import KVStore
from services.mlx.loader import load
from services.runtime.preparation import run_all
from tests.services.engine.test_slot_table import Line, shared_pass
from tests.services.engine.test_traced_forward import stores_of
from tests.services.kernels.cuda.host import attend_gathered, move_rows, write_rows
from tests.support.reference import tiny_folder

PROMPT = [token % 64 for token in range(20)]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load(tiny_folder("llama")).module
    enable_packing(module)
    for home in (kv_rows, traced_forward):
        monkeypatch.setattr(home, "writes_in_place", lambda *_: True)
    monkeypatch.setattr(kv_rows, "write", write_rows)
    monkeypatch.setattr(kv_rows, "move", move_rows)
    return module


def trace_eagerly(trace: Trace) -> None:
    trace.may_write, trace._replay = True, trace._forward


def traced_of(model: Any) -> TracedForward:
    traced = TracedForward(model)
    trace_eagerly(traced._trace)
    return traced


def prompt_of(model: Any) -> KVStore:
    store = stores_of(model)()
    store.chain(len(PROMPT))
    mx.eval(model(mx.array([PROMPT]), cache=store.caches))
    return store


def expect(model: Any, tokens: list[int], count: int) -> Any:
    """Logits of the last `count` of these tokens, by one pass over them all."""
    store = stores_of(model)()
    store.chain(len(tokens))
    return np.array(model(mx.array([tokens]), cache=store.caches)[0, -count:])


def assert_pass(traced: TracedForward, store: KVStore, chain: list[int], tokens: list[int]) -> None:
    """The pass over this chain has the logits that it has behind these tokens."""
    store.chain(len(chain))
    found = np.array(traced(mx.array([chain]), store)[0])
    np.testing.assert_allclose(found, expect(traced._trace.model, tokens, len(chain)), atol=1e-3)
    assert store.written is not None
    assert len(store.milestones) == len(store.caches)
    assert all(one is other for one, other in zip(store.milestones, store.written, strict=True))


def test_the_buffers_stay_where_they_are(model: Any) -> None:
    traced, store = traced_of(model), prompt_of(model)
    before, tokens = store.caches[1].values, list(PROMPT)
    for chain in ([7, 8, 9, 10], [11], [12, 13]):
        tokens += chain
        assert_pass(traced, store, chain, tokens)
    assert store.caches[1].values is before


def test_a_fork_and_its_origin_write_into_buffers_of_their_own(model: Any) -> None:
    """In turn, whoever comes first."""
    traced, origin = traced_of(model), prompt_of(model)
    fork = origin.fork(18)
    for store, length, chain in ((fork, 18, [40, 41]), (origin, 20, [50, 51, 52])) * 2:
        store.trim(length)
        assert_pass(traced, store, chain, PROMPT[:length] + chain)
    second = fork.fork(19)
    for store, chain in ((fork, [60]), (second, [61])):
        store.trim(19)
        assert_pass(traced, store, chain, [*PROMPT[:18], 40, *chain])


def test_of_a_tree_a_path_stands(model: Any) -> None:
    traced, store = traced_of(model), prompt_of(model)
    tree = read_tree([5, 9, 3, 11, 4], [0, 0, 1, 2])
    store.append_tree(tree)
    mx.eval(traced(mx.array([tree.tokens]), store))
    store.commit_rows([0, 2, 4])
    assert_pass(traced, store, [6, 7], [*PROMPT, 5, 3, 4, 6, 7])


def test_shared_passes_leave_the_table_where_it_is(model: Any) -> None:
    queue = PassQueue(ModelRunner(model), 512)
    queue.runner.table = table = run_all(find_table(model, stores_of(model), attend_gathered))
    assert table is not None
    lines = [Line(model, [3, 1, 4]), Line(model, [1, 5])]
    shared_pass(queue, lines, [[5], [6]], 1)
    table._traced = Trace(model, attend=attend_gathered)
    trace_eagerly(table._traced)
    before = [layer.keys for layer in table._layers]
    for keep in (2, 1):
        shared_pass(queue, lines, [[8, 9, 7], [2, 11]], keep)
        assert table.milestones is table._written
        assert len(table._written) == len(table._layers)
    assert all(layer.keys is own for layer, own in zip(table._layers, before, strict=True))
