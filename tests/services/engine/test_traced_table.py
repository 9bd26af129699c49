"""Traces of passes over a table are used where they are right and faster, and read like others."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.engine.packing import enable_packing
from services.engine.slot_table import SlotTable
from services.engine.target_model import find_table
from services.kv.cache import KVStore
from services.mlx import selftest
from services.mlx.loader import load, windows_of
from services.runtime.preparation import run_all
from tests.services.kernels.cuda.host import attend_gathered
from tests.support.reference import tiny_folder

pytestmark = pytest.mark.skipif(
    mx.cuda.is_available(), reason="MLX's attention takes no batch of 64 rows and more there"
)


class Counted:
    """A model whose calls are counted: a replay is none."""

    def __init__(self, module: Any, change: Callable[[mx.array, Any], mx.array]) -> None:
        self._module, self._change = module, change
        self.calls = 0

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.calls += 1
        return self._change(self._module(tokens, cache=cache), cache)


def warm_table(
    change: Callable[[mx.array, Any], mx.array] = lambda logits, _: logits,
) -> tuple[SlotTable, Counted, Callable[[], KVStore]]:
    module = load(tiny_folder("llama")).module
    enable_packing(module)
    windows = windows_of(module)

    def make() -> KVStore:
        return KVStore(windows, bucketed=False)

    table = run_all(find_table(module, make, attend_gathered))
    assert table is not None
    model = Counted(module, change)
    run_all(table.warm_up(model, make))
    return table, model, make


def run(table: SlotTable, model: Counted, stores: list[KVStore]) -> Any:
    for store in stores:
        store.append(3)
    logits = table.run(model, mx.array([[4, 5, 6] * len(stores)]), stores)
    assert logits is not None
    return np.array(logits)


@pytest.mark.parametrize("worthwhile", [float("inf"), 0.0])
def test_traces_are_used_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, worthwhile: float
) -> None:
    """Then a pass of a size that was traced at load calls the model no more."""
    monkeypatch.setattr(selftest, "_WORTHWHILE", worthwhile)
    table, model, make = warm_table()
    before = model.calls
    logits = run(table, model, [make(), make()])
    assert (model.calls == before) is (worthwhile > 0.0)
    np.testing.assert_allclose(logits[0, :3], logits[0, 3:], atol=1e-5)
    for _ in range(2):  # too many rows to be traced
        before = model.calls
        run(table, model, [make() for _ in range(30)])
        assert model.calls > before


def test_traces_of_another_model_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one that computes prompts may be."""
    monkeypatch.setattr(selftest, "_WORTHWHILE", float("inf"))
    table, model, make = warm_table()
    other = Counted(model, lambda logits, _: 2.0 * logits)
    logits = [run(table, one, [make()]) for one in (model, other)]
    np.testing.assert_allclose(2.0 * logits[0], logits[1], atol=1e-5)


def _shift_in_traces(logits: mx.array, cache: Any) -> mx.array:
    """Other logits where keys have no values yet, as in a trace."""
    try:
        mx.eval(cache[0].offset)
    except RuntimeError:
        return logits + 1.0
    return logits


def _decide(logits: mx.array, cache: Any) -> mx.array:
    """By a value, which no trace can hold."""
    first: Any = cache[0].offset[0].item()
    return logits if first >= 0 else -logits


@pytest.mark.parametrize("change", [_shift_in_traces, _decide])
def test_what_cannot_be_traced_is_found_at_load(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[mx.array, Any], mx.array]
) -> None:
    monkeypatch.setattr(selftest, "_WORTHWHILE", float("inf"))
    table, model, make = warm_table(change)
    before = model.calls
    run(table, model, [make(), make()])
    assert model.calls > before


class Reads:
    """Reads the sum of each token's logits."""

    def __init__(self) -> None:
        self.caught: mx.array | None = None
        self.replayed: mx.array | None = None

    def catch(self, logits: mx.array, _: Any) -> mx.array:
        self.caught = logits[0].sum(axis=-1, keepdims=True)
        return logits

    def compute(self) -> mx.array | None:
        return self.caught

    def put(self, features: mx.array) -> None:
        self.replayed = features


def test_what_is_read_of_the_model_is_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment on when it is asked for."""
    monkeypatch.setattr(selftest, "_WORTHWHILE", float("inf"))
    reads = Reads()
    table, model, make = warm_table(reads.catch)
    run(table, model, [make()])
    assert reads.replayed is None
    table.read(reads)
    for _ in range(2):
        reads.replayed = None
        logits = run(table, model, [make(), make()])
        assert reads.replayed is not None
        np.testing.assert_allclose(np.array(reads.replayed)[:6, 0], logits[0].sum(-1), atol=1e-3)
