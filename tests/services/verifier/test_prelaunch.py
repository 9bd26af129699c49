"""A pass that is launched before its tokens are known has the outcome of one that was asked for."""

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.decoding.token_tree import read_tree
from protocol.messages import CloseSequence, Extend, OpenSequence, Sampling, Verify
from services.engine import batch, prelaunch
from services.engine.pass_handle import PassHandle
from services.engine.prelaunch import Prelauncher, choose_rows
from services.engine.runner import ModelRunner
from services.engine.traced_forward import TREE_ROWS, TracedForward
from services.kv.cache import KVStore
from services.mlx.loader import load
from services.runtime.preparation import run_all
from services.verifier import pass_times
from services.verifier.stages import VerifierStages
from services.verifier.verifier import Verifier
from tests.properties import examples
from tests.services.verifier.fake_doorbell import FakeDoorbell
from tests.services.verifier.test_trees import (
    NUMBERS,
    PROMPTS,
    Shape,
    Stream,
    shapes,
)
from tests.support.reference import said, tiny_folder

GREEDY = Sampling()


@cache
def _traced() -> tuple[Verifier, TracedForward]:
    """A verifier of its own, and its model's passes over trees of up to thirty-two, traced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.engine.target_model.equip", lambda _: False)
        verifier = Verifier(load(tiny_folder("llama")), 512)
    model = verifier._model
    traced = TracedForward(model)
    store = verifier.new_state()
    assert isinstance(store, KVStore)
    for rows in TREE_ROWS:
        traced.prepare(batch.Shape(rows, 256, forks=True), lambda: store.fork(0))
    return verifier, traced


class Rung(Stream):
    """A sequence whose passes wait for their tokens."""

    def __init__(self, prompt: tuple[int, ...], is_late: Callable[[], bool]) -> None:
        verifier, traced = _traced()
        self.bell = FakeDoorbell(is_late)
        verifier.scheduler.prelauncher = Prelauncher(
            ModelRunner(verifier.target.verify, traced), self.bell
        )
        super().__init__("llama", prompt, GREEDY, verifier=verifier)

    def close(self) -> None:
        super().close()
        assert not self.bell.waiting


@given(st.sampled_from(PROMPTS), st.lists(shapes, min_size=2, max_size=6), st.data())
@examples(40)
def test_outcomes_are_those_of_passes_that_were_asked_for(
    prompt: tuple[int, ...], played: list[Shape], data: st.DataObject
) -> None:
    """Chains and trees, longer ones than the pass that waits, and some that come too late."""
    stream = Rung(prompt, lambda: data.draw(st.sampled_from([False, False, False, True])))
    stream.verify_all(played)
    stream.close()


FLAT = {8: 6.8, 16: 7.0, 32: 7.5}
STEPPED = {8: 6.8, 16: 9.1, 32: 12.0}


@pytest.mark.parametrize(
    ("lengths", "pass_ms", "rows"),
    [
        ([], FLAT, 8),
        ([1, 3, 2, 4], FLAT, 8),  # there is room for drafts to become longer
        ([4] * 47 + [12], FLAT, 8),  # a single one may be a prompt lookup
        ([4] * 20 + [12] * 4, FLAT, 16),  # each would be two passes
        ([4] * 20 + [12] * 4, STEPPED, 8),
        ([4] * 12 + [12] * 12, STEPPED, 16),
        ([20] * 24, STEPPED, 32),
    ],
)
def test_a_pass_has_rows_for_what_is_likely_to_come(
    lengths: list[int], pass_ms: dict[int, float], rows: int
) -> None:
    assert choose_rows(lengths, pass_ms) == rows


def test_the_trees_of_the_warm_up_say_nothing_of_those_to_come() -> None:
    """They had all sizes; and passes are as dear as they were timed."""
    prelauncher = Prelauncher(ModelRunner(None))
    prelauncher._lengths.extend([32] * 24)
    prelauncher.expect_passes(STEPPED)
    assert not prelauncher._lengths
    assert prelauncher._pass_ms == STEPPED
    prelauncher.expect_passes({8: 1.0})  # the time was over
    assert prelauncher._pass_ms == STEPPED


CHAIN: Shape = [(0, 0), (1, 0)]
"""Two right tokens."""


def test_each_verification_behind_the_first_is_rung_for() -> None:
    stream = Rung(PROMPTS[0], lambda: False)
    stream.verify_all([CHAIN, CHAIN, CHAIN])
    assert (stream.bell.rung, stream.bell.called_off, bool(stream.bell.waiting)) == (2, 0, True)
    stream.close()
    assert stream.bell.called_off == 1


def test_what_does_not_fit_calls_the_pass_off() -> None:
    """A chain that is longer than the pass is computed by itself."""
    stream = Rung(PROMPTS[0], lambda: False)
    stream.verify_all([CHAIN])
    stream.verify_all([[(row, 0) for row in range(9)]])
    assert stream.bell.called_off == 1
    stream.close()


def test_a_pass_that_is_taken_is_the_one_whose_rows_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it waits, the pass in work is another one."""
    numbers = iter(range(100))
    run = TracedForward.replay

    def run_in_place(self: TracedForward, *args: Any) -> Any:
        return run(self, *args)._replace(written=[mx.array(next(numbers))])

    monkeypatch.setattr(TracedForward, "replay", run_in_place)
    monkeypatch.setattr("services.kv.cache.launch", lambda *_: None)
    stream = Rung(PROMPTS[0], lambda: False)
    state = stream.verifier._sequences[stream.number].state
    assert isinstance(state, KVStore)
    seen = []
    for _ in range(3):
        stream.verify_all([CHAIN])
        seen.append([] if state.written is None else [one.item() for one in state.written])
    # The first one was asked for: such a pass is a trace's on CUDA only.
    assert seen == ([[0], [1], [2]] if mx.cuda.is_available() else [[], [0], [1]])
    stream.close()


FORKED: Shape = [(0, 0), (0, 1)]


def test_behind_a_tree_none_waits() -> None:
    """Its rows may be moved; behind chains one always does."""
    stream = Rung(PROMPTS[0], lambda: False)
    stream.verify_all([FORKED])
    assert not stream.bell.waiting
    stream.verify_all([CHAIN])
    assert stream.bell.waiting
    stream.verify_all([FORKED])
    assert not stream.bell.waiting
    stream.close()


def test_behind_a_tree_that_is_too_large_none_waits_but_behind_the_next_one() -> None:
    """The choices of so many rows cannot be read while something waits."""
    stream = Rung(PROMPTS[0], lambda: False)
    stream.verify_all([[(row, 1) for row in range(TREE_ROWS[-1] + 4)]])
    assert not stream.bell.waiting
    stream.verify_all([CHAIN])
    assert stream.bell.waiting
    stream.close()


def test_nothing_waits_while_a_prompt_is_computed() -> None:
    """Its chunks would come behind it."""
    stream = Rung(PROMPTS[0], lambda: False)
    stream.verify_all([CHAIN])
    prompt = [1 + token % 200 for token in range(100)]
    other = OpenSequence(sequence=next(NUMBERS), tokens=prompt, sampling=GREEDY)
    opening = stream.verifier.handle(other)
    assert next(opening) is None
    stream.verify_all([CHAIN])
    assert not stream.bell.waiting
    said(opening)
    said(stream.verifier.handle(CloseSequence(sequence=other.sequence)))
    stream.verify_all([CHAIN])
    assert stream.bell.waiting
    stream.close()


def test_another_sequence_has_the_device_for_itself() -> None:
    stream = Rung(PROMPTS[0], lambda: False)
    stream.verify_all([CHAIN])
    other = OpenSequence(sequence=next(NUMBERS), tokens=list(PROMPTS[1]), sampling=GREEDY)
    said(stream.verifier.handle(other))
    assert not stream.bell.waiting
    stream.verify_all([CHAIN])
    assert not stream.bell.waiting, "two sequences share passes"
    said(stream.verifier.handle(CloseSequence(sequence=other.sequence)))
    stream.close()


def test_a_grant_for_what_is_in_work_leaves_the_pass_waiting() -> None:
    stream = Rung(PROMPTS[0], lambda: False)
    stream.verify_all([CHAIN])
    said(stream.verifier.handle(Extend(sequence=stream.number, round=1, granted=1)))
    assert stream.bell.waiting
    stream.close()


def test_a_pass_waits_for_whatever_is_asked_for() -> None:
    """Not within a free run, which begins its passes ahead; also while the drafter rests."""
    stream = Rung(PROMPTS[0], lambda: False)
    for more, waits in (({"granted": 1}, False), ({"drafter_idle": True}, True)):
        ask = stream.ask(read_tree([stream.committed[-1]], []))
        message = Verify(
            sequence=ask.sequence,
            round=ask.round,
            position=ask.position,
            nodes=ask.nodes,
            stop_ids=[stream.rest[0]],
            **more,
        )
        said(stream.verifier.handle(message))
        assert bool(stream.bell.waiting) is waits
        stream.committed.append(stream.rest.pop(0))
    stream.close()


def test_passes_are_timed_as_those_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched before their tokens are known, each with the rows that it needs; none stays."""
    monkeypatch.setattr(pass_times, "_BUDGET_S", 60.0)
    monkeypatch.setattr(pass_times, "_DEAR", 1e6)
    verifier, traced = _traced()
    bell = FakeDoorbell(lambda: False)
    runner = ModelRunner(verifier.target.verify, traced)
    verifier.scheduler.prelauncher = prelauncher = Prelauncher(runner, bell)
    lengths: list[set[int]] = []

    def choose(seen: Any, pass_ms: Any) -> int:
        lengths.append(set(seen))
        return choose_rows(seen, pass_ms)

    monkeypatch.setattr(prelaunch, "choose_rows", choose)
    identity: Any = SimpleNamespace()
    run_all(VerifierStages(verifier, identity, "off")._time_passes())
    chains = identity.pass_times.chains
    assert set(chains) == set(pass_times._CHAINS)
    assert bell.rung >= len(chains) * pass_times._SWEEPS
    assert all(len(seen) == 1 for seen in lengths)  # no other size has a say
    assert not bell.waiting
    assert prelauncher._pass_ms == {rows: chains[rows] for rows in (8, 16, 32)}


def test_passes_that_come_too_late_again_and_again_are_launched_no_more() -> None:
    stream = Rung(PROMPTS[0], lambda: True)
    stream.verify_all([[]] * 12)
    rung = stream.bell.rung
    assert rung < 12
    stream.verify_all([[]] * 4)
    assert stream.bell.rung == rung
    stream.close()


def test_choices_that_are_left_to_the_host_call_the_pass_off() -> None:
    """Their logits could not be read while it waits."""
    verifier, _ = _traced()
    stream = Rung(PROMPTS[0], lambda: False)
    stream.verify_all([CHAIN])
    state = verifier._sequences[stream.number].state
    tree = read_tree([stream.committed[-1]], [])
    waiting = verifier.scheduler.prelauncher
    assert waiting.claim(state, tree) is not None
    for choice, waits in ((7, True), (-1, False)):
        current = PassHandle(state=state, logits=mx.zeros((1, 1)), choice=mx.array([choice]))
        waiting.launch(current, tree, stream.number)
        assert waiting.settle(current) == [choice]
        assert bool(stream.bell.waiting) == waits
        waiting.call_off()
    state.commit(len(stream.committed) - 1)
    stream.close()


@pytest.mark.parametrize("is_late", [False, True])
def test_launching_beforehand_is_tried(monkeypatch: pytest.MonkeyPatch, *, is_late: bool) -> None:
    """It is used if passes that wait have the logits of the others, and none is rung too late."""
    verifier, traced = _traced()
    bell = FakeDoorbell(lambda: is_late)
    monkeypatch.setattr(prelaunch, "open_doorbell", lambda: bell)
    monkeypatch.setattr(prelaunch, "is_faster", lambda *_: True)
    monkeypatch.setattr(prelaunch, "TRACED_SLOTS", (256,))
    monkeypatch.setattr(prelaunch, "_ARRIVAL_S", 0.0)
    runner, store = ModelRunner(verifier.target.verify, traced), verifier.new_state()
    assert isinstance(store, KVStore)
    found = run_all(prelaunch.find_doorbell(runner, lambda: store.fork(0)))
    assert found is (None if is_late else bell)
    assert bell.rung == prelaunch._TRIAL_TURNS + (0 if is_late else 2 * len(TREE_ROWS))
    assert not bell.waiting


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    verifier, _ = _traced()
    verifier.retire_all()
    verifier.scheduler.prelauncher = None
