"""Shared passes over one table of slots: each sequence gets what it gets alone.

The attention is MLX's own here; the kernel that stands in its place on CUDA is compared with it
in `test_decode_attention.py`, and with the model's own logits when a model is loaded there.
"""

import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.batching.forward import Batcher
from services.batching.packing import enable_packing, supports_table
from services.batching.slot_table import SlotTable, attend_gathered
from services.kv.cache import KVStore, windows_of
from services.mlx.loader import load
from tests.support.reference import tiny_folder

FAMILIES = ["llama", "qwen3", "moe"]


def model_of(family: str) -> Any:
    module = load(tiny_folder(family)).module
    enable_packing(module)
    return module


def table_of(module: Any) -> Batcher:
    batcher = Batcher(module, 64)
    batcher.table = SlotTable(attend_gathered)
    return batcher


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

    def submit(self, batcher: Batcher, tokens: list[int]) -> None:
        def begin() -> list[int]:
            self.state.append(len(tokens))
            return []

        self.request = batcher.submit(tokens, self.state, begin)
        self.alone.append(len(tokens))
        self.expected = self._module(mx.array([tokens]), cache=self.alone.caches)[0]

    def check(self, batcher: Batcher, keep: int) -> None:
        """The logits are right; the first `keep` tokens of the pass stand."""
        logits, _ = batcher.result(self.request)
        np.testing.assert_allclose(np.array(logits), np.array(self.expected), atol=3e-4)
        for store in (self.state, self.alone):
            store.commit(store.frame.start + keep)


def shared_pass(batcher: Batcher, lines: list[Line], tokens: list[list[int]], keep: int) -> None:
    for line, own in zip(lines, tokens, strict=True):
        line.submit(batcher, own)
    for line, own in zip(lines, tokens, strict=True):
        line.check(batcher, min(keep, len(own)))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_gets_what_it_gets_alone(family: str) -> None:
    """Chains of different lengths after prompts of different lengths, and rejected tails."""
    module = model_of(family)
    batcher = table_of(module)
    lines = [Line(module, [3, 1, 4]), Line(module, list(range(20, 37))), Line(module, [])]
    for keep in (1, 2, 1):
        shared_pass(batcher, lines, [[5, 6, 7], [8], [9, 10]], keep)
    assert all(line.state.seat is not None for line in lines)


def test_sequences_come_and_go() -> None:
    """Others are not copied, the seats of those that have gone are used again."""
    module = model_of("llama")
    batcher = table_of(module)
    lines = [Line(module, [3, 1, 4, index]) for index in range(3)]
    shared_pass(batcher, lines, [[5]] * 3, 1)
    first = lines[0].state.seat
    gone = lines.pop()
    used = gone.state.seat
    assert used is not None
    index = used.index
    gone.state.leave_table()
    lines += [Line(module, [9, 9]), Line(module, [7, 7, 7])]
    shared_pass(batcher, lines, [[6]] * 4, 1)
    assert lines[0].state.seat is first
    assert index in {line.state.seat.index for line in lines if line.state.seat is not None}
    # What has left goes on by itself.
    shared_pass(batcher, [gone], [[6, 7]], 2)
    assert gone.state.seat is None


def test_a_table_grows() -> None:
    """More sequences than it has seats, and longer ones than it has slots."""
    module = model_of("llama")
    batcher = table_of(module)
    lines = [Line(module, [3, index]) for index in range(4)]
    shared_pass(batcher, lines, [[5]] * 4, 1)
    lines += [Line(module, [index % 250 for index in range(900)]), Line(module, [8, 8])]
    shared_pass(batcher, lines, [[6, 7]] * 6, 1)
    shared_pass(batcher, lines, [[6, 7]] * 6, 2)


def test_a_fork_and_a_tail_have_what_was_computed_together() -> None:
    """A sequence at the table can be forked, cut and continued alone."""
    module = model_of("llama")
    batcher = table_of(module)
    lines = [Line(module, [3, 1, 4]), Line(module, [1, 5])]
    shared_pass(batcher, lines, [[5, 6, 7], [8]], 2)
    line = lines[0]
    forks = [store.fork(4) for store in (line.state, line.alone)]
    logits = []
    for fork in forks:
        fork.append(1)
        logits.append(np.array(module(mx.array([[9]]), cache=fork.caches)))
    np.testing.assert_allclose(logits[0], logits[1], atol=3e-4)
    shared_pass(batcher, lines, [[6], [9]], 1)


def test_rows_that_stand_are_moved_at_the_table() -> None:
    """As after a tree: some rows of a pass stand, others between them do not."""
    module = model_of("llama")
    batcher = table_of(module)
    lines = [Line(module, [3, 1, 4]), Line(module, [1, 5])]
    for line in lines:
        line.submit(batcher, [5, 6, 7])
    for line in lines:
        batcher.result(line.request)
        for store in (line.state, line.alone):
            store.commit_rows([0, 2])
        assert line.state.seat is not None
    shared_pass(batcher, lines, [[6], [9]], 1)


def test_nobody_holds_a_seat_for_long() -> None:
    """A sequence that is dropped frees its seat, and an empty table its memory."""
    module = model_of("llama")
    batcher = table_of(module)
    table = batcher.table
    assert table is not None
    lines = [Line(module, [3, 1]), Line(module, [1, 5])]
    shared_pass(batcher, lines, [[5], [6]], 1)
    lines[0].request = lines[1].request = None
    dropped = weakref.ref(lines.pop().state)
    assert dropped() is None
    shared_pass(batcher, lines, [[7]], 1)  # alone: it takes its slots back
    assert table._layers == []


def test_a_model_that_works_with_a_table_is_found_out() -> None:
    module = model_of("llama")
    windows = windows_of(module)

    def make() -> KVStore:
        return KVStore(windows, bucketed=False)

    def broken(*arguments: Any) -> mx.array:
        return 2.0 * attend_gathered(*arguments)

    assert supports_table(module, make, attend_gathered)
    assert not supports_table(module, make, broken)
