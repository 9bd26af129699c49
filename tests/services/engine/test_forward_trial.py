"""What is replayed on a device is tried out first."""

import re
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.engine import forward_trial
from services.engine.batch import Batch, BatchPart
from services.engine.forward_trial import trace_if_faster
from services.engine.runner import ModelRunner
from services.engine.scheduler import follow
from services.engine.traced_forward import TREE_ROWS, TracedForward
from services.mlx import selftest
from services.mlx.loader import load
from services.mlx.rope import allow_branches
from services.mlx.selftest import Verdict
from services.runtime.preparation import Steps, run_all
from tests.services.engine.test_traced_forward import TREES, prefill, stores_of
from tests.services.runtime.steps import at_once
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    module = load(write_tiny_model(tmp_path_factory.mktemp("model"), "llama")).module
    allow_branches(module)
    return module


def _counting(replay: Any, calls: list[int]) -> Any:
    def run(*given: Any) -> Any:
        calls.append(1)
        return replay(*given)

    return run


class _WrongInTraces:
    """A model that gives other logits when it is traced."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache)
        if isinstance(cache[0].offset, mx.array):
            return logits + 1.0
        return logits


class _WrongInTrees:
    """A model that gives other logits where traced rows have positions of their own."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache)
        offset = cache[0].offset
        forks = isinstance(offset, mx.array) and offset.ndim > 0
        return logits + 1.0 if forks and hasattr(cache[0], "is_traced") else logits


class _Deciding(_WrongInTraces):
    """A model that decides by a value, which no trace can hold."""

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        assert int(tokens.sum().item()) >= 0
        logits: mx.array = self._model(tokens, cache=cache)
        return logits


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        ({4: 1.0, 8: 1.1, 16: 1.2, 32: 1.3}, (4, 8, 16, 32)),
        ({4: 1.0, 8: 1.1, 16: 1.5, 32: 1.3}, (4, 8, 32)),
        ({4: 1.31, 8: 1.31, 16: 1.32, 32: 1.3}, (4, 8, 16, 32)),  # a noisy clock
        ({4: 1.4, 8: 1.5, 16: 1.3, 32: 1.2}, (32,)),
    ],
)
def test_a_size_is_dropped_if_a_larger_one_is_faster(
    seconds: dict[int, float], sizes: tuple[int, ...]
) -> None:
    assert forward_trial.drop_slow(seconds) == sizes


def test_sizes_that_are_slow_are_not_traced(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_trial, "_compare", lambda *_: at_once(Verdict(faster=True)))
    monkeypatch.setattr(forward_trial, "TRACED_SLOTS", (256,))
    monkeypatch.setattr(forward_trial, "MOST_ROWS", 1)
    times = {4: 1.0, 8: 1.5, 16: 1.5, 32: 1.2}
    monkeypatch.setattr(forward_trial, "_time_trees", lambda *_: at_once(times))
    traced = run_all(trace_if_faster(model, stores_of(model), takes_trees=True))
    assert traced is not None
    assert traced.tree_rows == (4, 32)
    assert {shape.rows for shape in traced.shapes if shape.forks} == {4, 32}


def test_each_size_of_trees_is_timed(model: Any) -> None:
    """Behind the same text."""
    found = run_all(forward_trial._time_trees(model, TracedForward(model), stores_of(model)))
    assert tuple(found) == TREE_ROWS
    assert all(seconds > 0.0 for seconds in found.values())


@pytest.mark.parametrize(("faster", "ahead"), [(True, False), (False, True), (False, False)])
def test_single_tokens_are_replayed_where_that_is_faster(
    model: Any, monkeypatch: pytest.MonkeyPatch, *, faster: bool, ahead: bool
) -> None:
    """Awaited ones, those that begin ahead, or none; chains are anyway, with the same logits."""
    monkeypatch.setattr(
        forward_trial,
        "_compare",
        lambda *said: at_once(Verdict(faster=faster or said[-1] != "single tokens")),
    )
    monkeypatch.setattr(forward_trial, "_is_worth_it_ahead", lambda *_: at_once(ahead))
    monkeypatch.setattr(forward_trial, "TRACED_SLOTS", (256,))
    traced = run_all(trace_if_faster(model, stores_of(model)))
    assert traced is not None
    own, other = prefill(model, 20), prefill(model, 20)
    other.chain(2)
    assert traced.serves(other)
    for store in (own, other):
        store.trim(20)
        store.chain(1)
    assert traced.serves(other) is faster
    assert traced.serves(other, ahead=True) is ahead
    expected = np.array(model(mx.array([[7]]), cache=own.caches))
    np.testing.assert_allclose(np.array(traced(mx.array([[7]]), other)), expected, atol=1e-4)


def test_single_tokens_that_are_wrong_are_not_replayed_ahead_either(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        forward_trial,
        "_compare",
        lambda *said: at_once(
            Verdict("wrong") if said[-1] == "single tokens" else Verdict(faster=True)
        ),
    )
    monkeypatch.setattr(forward_trial, "_is_worth_it_ahead", lambda *_: at_once(result=True))
    monkeypatch.setattr(forward_trial, "TRACED_SLOTS", (256,))
    traced = run_all(trace_if_faster(model, stores_of(model)))
    assert traced is not None
    assert not any(traced.singles)


@pytest.mark.parametrize(
    ("own_s", "replayed_s", "ahead"), [(1.0, 0.9, True), (1.0, 1.03, True), (0.9, 1.0, False)]
)
def test_a_token_that_begins_ahead_is_replayed_where_that_is_faster_ahead(
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    own_s: float,
    replayed_s: float,
    *,
    ahead: bool,
) -> None:
    """Its launches are hidden behind the pass before it."""
    monkeypatch.setattr(selftest, "is_faster", lambda *_: True)
    monkeypatch.setattr(forward_trial, "time_in_turn", lambda _: at_once([own_s, replayed_s]))
    monkeypatch.setattr(forward_trial, "TRACED_SLOTS", (256,))
    traced = run_all(trace_if_faster(model, stores_of(model)))
    assert traced is not None
    replaying, plain = ModelRunner(model, traced), ModelRunner(model)
    found, replays = [], list[int]()
    trace = traced._trace
    monkeypatch.setattr(trace, "_replay", _counting(trace._replay, replays), raising=True)
    for one in (replaying, plain):
        store = prefill(model, 6)
        [first] = one.run(Batch([BatchPart(store, 1, partial(store.append, 1), [3])]))
        [after] = one.run(follow(mx.array([4]), [store]))
        found.append(np.array(mx.concatenate([first.logits, after.logits])))
    assert len(replays) == (2 if ahead else 1)
    np.testing.assert_allclose(*found, atol=1e-4)


def test_ahead_is_tried_as_it_is_run(model: Any) -> None:
    """Each pass is fed what the last one chose, and the stores stay as they were."""
    chosen = []

    def time_in_turn(ways: Any) -> Steps[list[float]]:
        chosen.extend([way().tolist(), way().tolist()] for way in ways)
        yield
        return [1.0, 0.5]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_trial, "time_in_turn", time_in_turn)
        ahead = forward_trial._is_worth_it_ahead(model, TracedForward(model), stores_of(model))
        assert run_all(ahead)
    own, replayed = chosen
    assert own == replayed
    assert own[0] == own[1]


def test_a_wrong_trace_is_not_used(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    wrong = _WrongInTraces(model)
    assert run_all(trace_if_faster(wrong, stores_of(model))) is None
    assert re.search("traced chains: .* from the usual result: not used", caplog.text)


def test_wrong_traces_of_trees_are_found_at_load(
    model: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains may be traced where trees are not; how fast either is, is not asked here."""
    allow_branches(model)
    monkeypatch.setattr(selftest, "_WORTHWHILE", float("inf"))
    monkeypatch.setattr(forward_trial, "TRACED_SLOTS", (256,))
    for name, one in (("right", model), ("wrong", _WrongInTrees(model))):
        traced = run_all(trace_if_faster(one, stores_of(model), takes_trees=True))
        assert traced is not None
        store = prefill(model, 9)
        store.append_tree(TREES["six"])
        assert traced.serves(store) is (name == "right")
    assert re.search("traced trees: .* from the usual result: not used", caplog.text)


def test_a_model_that_cannot_be_traced_runs_as_it_is(model: Any) -> None:
    deciding = _Deciding(model)
    assert run_all(trace_if_faster(deciding, stores_of(model))) is None
