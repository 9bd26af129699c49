"""Shared passes over one table of slots: each sequence gets what it gets alone.

The attention is MLX's own here; the kernel that stands in its place on CUDA is compared with it
in `kernels/cuda/test_attention.py`, and with the model's own logits when a model is loaded there.
"""

import weakref
from functools import partial
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from protocol.process.free_memory import FreeMemory
from services.engine import slot_table
from services.engine.batch import BatchPart
from services.engine.packing import enable_packing
from services.engine.pass_handle import PassQueue
from services.engine.runner import ModelRunner
from services.engine.slot_table import SlotTable
from services.engine.target_model import find_table
from services.engine.trace import Trace
from services.kv.cache import KVStore
from services.mlx.loader import load, windows_of
from services.runtime.preparation import run_all
from tests.services.kernels.cuda.host import attend_gathered, move_rows
from tests.support.reference import tiny_folder

_wide = pytest.mark.skipif(
    mx.cuda.is_available(), reason="MLX's attention takes no batch of 64 rows and more there"
)
FAMILIES = ["llama", "qwen3", "moe"]


@pytest.fixture(autouse=True, params=[False, True], ids=["own", "traced"])
def _passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds whether passes of few rows are the model's own or replays of a trace."""
    monkeypatch.setattr(Tables, "are_traced", request.param)


class Tables:
    are_traced = False


def model_of(family: str) -> Any:
    module = load(tiny_folder(family)).module
    enable_packing(module)
    return module


def table_of(module: Any) -> PassQueue:
    queue = PassQueue(ModelRunner(module), 64)
    queue.runner.table = SlotTable(attend_gathered)
    if Tables.are_traced:
        queue.runner.table._traced = Trace(module, attend=attend_gathered)
    return queue


class Line:
    """A sequence, and the same one that is computed alone."""

    def __init__(self, module: Any, prompt: list[int]) -> None:
        self._module = module
        windows = windows_of(module)
        self.state, self.alone = (KVStore(windows, bucketed=False) for _ in range(2))
        for store in (self.state, self.alone):
            if prompt:
                store.append(len(prompt))
                mx.eval(module(mx.array([prompt]), cache=store.caches))
        self.expected: Any = None
        self.request: Any = None

    def submit(self, queue: PassQueue, tokens: list[int]) -> None:
        count = len(tokens)
        begin = partial(self.state.append, count)
        self.request = queue.submit(BatchPart(self.state, count, begin, tokens))
        self.alone.append(len(tokens))
        self.expected = self._module(mx.array([tokens]), cache=self.alone.caches)[0]

    def check(self, queue: PassQueue, keep: int) -> None:
        """The logits are right; the first `keep` tokens of the pass stand."""
        logits = queue.result(self.request).logits
        np.testing.assert_allclose(np.array(logits), np.array(self.expected), atol=3e-4)
        for store in (self.state, self.alone):
            store.commit(store.span.start + keep)


def shared_pass(queue: PassQueue, lines: list[Line], tokens: list[list[int]], keep: int) -> None:
    for line, own in zip(lines, tokens, strict=True):
        line.submit(queue, own)
    for line, own in zip(lines, tokens, strict=True):
        line.check(queue, min(keep, len(own)))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_gets_what_it_gets_alone(family: str) -> None:
    """Chains of different lengths after prompts of different lengths, and rejected tails."""
    module = model_of(family)
    queue = table_of(module)
    lines = [Line(module, [3, 1, 4]), Line(module, list(range(20, 37))), Line(module, [])]
    for keep in (1, 2, 1):
        shared_pass(queue, lines, [[5, 6, 7], [8], [9, 10]], keep)
    assert all(line.state.memory is not None for line in lines)


def test_sequences_come_and_go() -> None:
    """Others are not copied, the seats of those that have gone are used again."""
    module = model_of("llama")
    queue = table_of(module)
    lines = [Line(module, [3, 1, 4, index]) for index in range(3)]
    shared_pass(queue, lines, [[5]] * 3, 1)
    first = lines[0].state.memory
    gone = lines.pop()
    used = gone.state.memory
    assert used is not None
    index = used.index
    gone.state.gather()
    lines += [Line(module, [9, 9]), Line(module, [7, 7, 7])]
    shared_pass(queue, lines, [[6]] * 4, 1)
    assert lines[0].state.memory is first
    assert index in {line.state.memory.index for line in lines if line.state.memory is not None}
    # What has left goes on by itself.
    shared_pass(queue, [gone], [[6, 7]], 2)
    assert gone.state.memory is None


def test_a_table_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than it has seats, and longer ones than it has slots."""
    monkeypatch.setattr(slot_table, "_MOST_SEATS", 4)
    module = model_of("llama")
    queue = table_of(module)
    lines = [Line(module, [3, index]) for index in range(4)]
    shared_pass(queue, lines, [[5]] * 4, 1)
    lines += [Line(module, [index % 250 for index in range(900)]), Line(module, [8, 8])]
    shared_pass(queue, lines, [[6, 7]] * 6, 1)
    shared_pass(queue, lines, [[6, 7]] * 6, 2)


def test_a_fork_and_a_tail_have_what_was_computed_together() -> None:
    """A sequence at the table can be forked, cut and continued alone."""
    module = model_of("llama")
    queue = table_of(module)
    lines = [Line(module, [3, 1, 4]), Line(module, [1, 5])]
    shared_pass(queue, lines, [[5, 6, 7], [8]], 2)
    line = lines[0]
    forks = [store.fork(4) for store in (line.state, line.alone)]
    logits = []
    for fork in forks:
        fork.append(1)
        logits.append(np.array(module(mx.array([[9]]), cache=fork.caches)))
    np.testing.assert_allclose(logits[0], logits[1], atol=3e-4)
    shared_pass(queue, lines, [[6], [9]], 1)


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_that_stand_are_moved_at_the_table(
    monkeypatch: pytest.MonkeyPatch, *, in_place: bool
) -> None:
    """As after a tree: some rows of a pass stand, others between them do not."""
    moved = Mock(side_effect=move_rows)
    monkeypatch.setattr(slot_table.kv_rows, "move", moved)
    module = model_of("llama")
    queue = table_of(module)
    table = queue.runner.table
    assert table is not None
    lines = [Line(module, [3, 1, 4]), Line(module, [1, 5])]
    for line in lines:
        line.submit(queue, [5, 6, 7])
    for line in lines:
        mx.eval(queue.result(line.request).logits)
        table._written = [mx.array(0)] if in_place else []
        for store in (line.state, line.alone):
            store.commit_rows([0, 2])
        assert line.state.memory is not None
    assert moved.call_count == (2 * len(table._layers) if in_place else 0)
    shared_pass(queue, lines, [[6], [9]], 1)


def test_who_leaves_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last pass writes in place is launched, and still known to be; not what failed."""
    launched: list[Any] = []
    monkeypatch.setattr(slot_table, "launch", launched.append)
    module = model_of("llama")
    queue = table_of(module)
    table = queue.runner.table
    assert table is not None
    lines = [Line(module, [3, 1]), Line(module, [1, 5])]
    shared_pass(queue, lines, [[5], [6]], 1)
    table._written = written = [mx.array(0), mx.array(1)]
    lines[0].state.gather()
    assert launched == [written[-1]]
    assert table.milestones is written

    def fail(*_: Any) -> Any:
        table._written = written
        raise ZeroDivisionError

    monkeypatch.setattr(table, "run", fail)
    for line in lines:
        line.submit(queue, [7])
    for line in lines:
        line.check(queue, 1)  # one by one
    assert table._written == []


def test_nobody_holds_a_seat_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that is dropped frees its seat, and an empty table its memory, if it is much."""
    module = model_of("llama")
    queue = table_of(module)
    table = queue.runner.table
    assert table is not None
    lines = [Line(module, [3, 1]), Line(module, [1, 5])]
    shared_pass(queue, lines, [[5], [6]], 1)
    lines[0].request = lines[1].request = None
    shared_pass(queue, lines[1:], [[8]], 1)  # by itself, for the moment
    assert lines[1].state.memory is not None
    lines[1].request = None
    dropped = weakref.ref(lines.pop().state)
    assert dropped() is None
    shared_pass(queue, lines, [[7]], 1)  # alone: it takes its slots back
    assert lines[0].state.memory is None
    assert table._layers != []
    monkeypatch.setattr(slot_table, "_KEPT_BYTES", 0)
    shared_pass(queue, lines, [[7]], 1)
    assert table._layers == []


def test_a_large_table_has_few_seats_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    module = model_of("llama")
    queue, small = table_of(module), table_of(module)
    lines = [Line(module, [3, 1]), Line(module, [1, 5])]
    shared_pass(queue, lines, [[5], [6]], 1)
    monkeypatch.setattr(slot_table, "_KEPT_BYTES", 0)
    shared_pass(small, [Line(module, [3]), Line(module, [1])], [[5], [6]], 1)
    tables = [one.runner.table for one in (queue, small)]
    seats = [len(table._taken) for table in tables if table is not None]
    assert seats == [32, 4]


def test_a_table_for_which_there_is_no_memory_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sequences are computed one by one instead, in the same pass."""
    module = model_of("llama")
    queue = table_of(module)
    monkeypatch.setattr(slot_table, "free_for_mlx", lambda: FreeMemory(1000, "this test's limit"))
    lines = [Line(module, [3, 1]), Line(module, [1, 5])]
    shared_pass(queue, lines, [[5], [6]], 1)
    assert [line.state.memory for line in lines] == [None, None]


def test_a_table_for_which_there_is_no_memory_does_not_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sequences are computed one by one instead, in the same pass."""
    module = model_of("llama")
    queue = table_of(module)
    lines = [Line(module, [3, 1]), Line(module, [1, 5])]
    shared_pass(queue, lines, [[5], [6]], 1)
    monkeypatch.setattr(slot_table, "free_for_mlx", lambda: FreeMemory(1000, "this test's limit"))
    lines.append(Line(module, [index % 250 for index in range(900)]))
    shared_pass(queue, lines, [[7, 8]] * 3, 1)
    assert all(line.state.memory is None for line in lines)


@pytest.mark.parametrize(
    "rows", [1, 2, 3, 5, *(pytest.param(rows, marks=_wide) for rows in (64, 65, 200))]
)
def test_passes_are_filled_up_to_a_size_that_recurs(rows: int) -> None:
    """What is computed beside a sequence's own rows changes nothing of it."""
    module = model_of("llama")
    queue = table_of(module)
    queue.most_rows = 256
    sizes: list[int] = []

    def counted(tokens: Any, cache: Any) -> Any:
        sizes.append(tokens.shape[1])
        return module(tokens, cache=cache)

    queue.runner.model = counted
    lines = [Line(module, [3, 1, 4]), Line(module, [1, 5])]
    shared_pass(queue, lines, [[6] * rows, [7]], 1)
    assert sizes == [{2: 2, 3: 4, 4: 4, 6: 8, 65: 128, 66: 128, 201: 256}[rows + 1]]
    shared_pass(queue, lines, [[8], [9]], 1)


@_wide
def test_prompts_are_computed_at_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and together, in pieces, and whoever decodes beside them; nothing is copied there."""
    module = model_of("llama")
    decode = table_of(module)
    table = decode.runner.table
    assert table is not None
    shared_pass(decode, [Line(module, [3]), Line(module, [4])], [[5], [6]], 1)  # shapes are known
    fill = PassQueue(ModelRunner(module), 512)
    fill.runner.table, fill.runner.fills = table, True
    lines = [Line(module, []) for _ in range(3)]
    shared_pass(fill, lines[:1], [list(range(30))], 30)
    seats = [line.state.memory for line in lines]
    assert seats[0] is not None
    shared_pass(fill, lines, [[1, 2], list(range(70)), [3, 4, 5]], 2)
    shared_pass(decode, lines, [[8], [9], [7]], 1)
    assert lines[0].state.memory is seats[0]
    evaluated: list[mx.array] = []
    monkeypatch.setattr(mx, "eval", evaluated.extend)
    lines[0].state.evaluate()
    assert [keys.shape for keys, _ in evaluated] == [one.keys.shape for one in table._layers]


def test_prompts_that_read_much_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row reads for itself what it sees: MLX's own attention serves better."""
    module = model_of("llama")
    queue = table_of(module)
    shared_pass(queue, [Line(module, [3]), Line(module, [4])], [[5], [6]], 1)
    queue.runner.fills = True
    monkeypatch.setattr(slot_table, "_MOST_PROMPT_BYTES", 4096)
    lines = [Line(module, []), Line(module, [])]
    shared_pass(queue, lines, [list(range(50)), [1]], 2)
    assert [line.state.memory for line in lines] == [None, None]


once = pytest.mark.parametrize("_passes", [False], indirect=True, ids=["found"])
"""Of tests that find a table themselves, and with it whether to trace."""


@_wide
@once
def test_a_table_computes_passes_beforehand() -> None:
    """Of each small size, and nobody sits there afterwards."""
    module = model_of("llama")
    windows = windows_of(module)

    def make() -> KVStore:
        return KVStore(windows, bucketed=False)

    table = run_all(find_table(module, make, attend_gathered))
    assert table is not None
    sizes: set[int] = set()

    def counted(tokens: Any, cache: Any) -> Any:
        sizes.add(tokens.shape[1])
        return module(tokens, cache=cache)

    run_all(table.warm_up(counted, make))
    assert {2, 4, 8, 16, 32, 64} < sizes
    assert not any(map(table._sits, range(len(table._taken))))


@once
def test_a_model_that_works_with_a_table_is_found_out() -> None:
    module = model_of("llama")
    windows = windows_of(module)

    def make() -> KVStore:
        return KVStore(windows, bucketed=False)

    def broken(*arguments: Any) -> mx.array:
        return 2.0 * attend_gathered(*arguments)

    assert run_all(find_table(module, make, attend_gathered))
    assert not run_all(find_table(module, make, broken))
