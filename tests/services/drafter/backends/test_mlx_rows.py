"""Depths that are replayed from traces: the drafts of the model's own passes, or not used."""

import logging
from collections.abc import Sequence
from functools import cache
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from orchestrator.sequence.limits import Limits
from protocol.decoding.token_tree import read_tree
from protocol.messages import Sampling, Tokens
from services.drafter.backends import mlx_rows
from services.drafter.backends.base import RoundOptions
from services.drafter.backends.mlx import MlxBackend
from services.drafter.backends.mlx_rows import TracedPasses
from services.engine import traced_forward
from services.engine.batch import BatchArrays
from services.engine.trace import Trace
from services.kernels.cuda import kv_rows
from services.kernels.cuda.sampling.rules import write_rules
from services.mlx import selftest
from services.mlx.loader import load
from services.runtime.preparation import run_all
from services.sampling.device import guess
from services.verifier.verifier import Verifier
from tests.properties import examples
from tests.services.drafter.backends import test_mlx_trees
from tests.services.drafter.backends.test_mlx import PROMPT, SCRIPT, Line, Round, Setup, rounds
from tests.services.drafter.backends.test_mlx_ahead import LEAVES, as_on_a_cpu, as_on_a_gpu
from tests.services.kernels.cuda.host import move_rows, write_rows
from tests.support.lockstep import Lockstep
from tests.support.reference import SAMPLINGS, Reference, plain, said, tiny_folder

FAMILIES = ["llama", "qwen3"]

pytestmark = pytest.mark.usefixtures("all_candidates")


def trace(backend: MlxBackend, worthwhile: float = float("inf")) -> TracedPasses:
    """Use what is right, however fast it is here; a few shapes."""
    with (
        patch.object(selftest, "_WORTHWHILE", worthwhile),
        patch.object(mlx_rows, "TRACED_SLOTS", (256,)),
        patch.object(traced_forward, "TRACED_SLOTS", (256,)),
        patch.object(mlx_rows, "TRACED_ROWS", (1, 8, 32)),
    ):
        run_all(backend.trace())
    assert backend.ahead is not None
    assert backend.ahead.traced is not None
    return backend.ahead.traced


@cache
def setup_of(family: str) -> Setup:
    setup = Setup(as_on_a_gpu(tiny_folder(family)), Reference(tiny_folder(family)))
    assert len(trace(setup.backend).forward.shapes) == 3
    return setup


def traced_of(family: str) -> TracedPasses:
    ahead = setup_of(family).backend.ahead
    assert ahead is not None
    assert ahead.traced is not None
    return ahead.traced


@pytest.fixture
def replayed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each replay, those of the trials at load left out."""
    named = "family" in request.fixturenames
    setup_of(request.getfixturevalue("family") if named else "llama")
    seen: list[int] = []
    replay: Any = Trace.__call__

    def spy(self: Trace, batch: BatchArrays, *arguments: Any) -> Any:
        seen.append(batch.count)
        return replay(self, batch, *arguments)

    monkeypatch.setattr(Trace, "__call__", spy)
    return seen


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_equal_fresh_drafting(family: str, sampling: Sampling, replayed: list[int]) -> None:
    """Every branch and draft of many rounds in a row is that of a fresh start from its prefix."""
    line = Line(setup_of(family), sampling)
    for played in SCRIPT:
        line.play(played)
    assert line.outcomes_hit >= 6
    assert {1, 8} == set(replayed)
    setup_of(family).backend.close(line.number)


def test_of_the_deepest_hit_nothing_is_computed_again(replayed: list[int]) -> None:
    """The last tokens of a tree were fed behind it."""
    backend = setup_of("llama").backend
    list(backend.open(1, list(PROMPT), Sampling()))
    layers = said(backend.prepare(1, read_tree([120, 7]), [3, 2], 2))
    outcome = layers[0].outcomes[-1]
    backend.commit(1, len(PROMPT), [120, 7])
    replayed.clear()
    chain = [outcome.bonus, *(layer.tokens[-1] for layer in layers)]
    said(backend.prepare(1, read_tree(chain), [2, 2, 1], 1))
    assert replayed == [8, 8]  # a depth, and its tokens
    backend.close(1)


def test_a_tree_is_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the paths that are kept are moved there; the drafts are those of a fresh start."""
    setup = Setup(as_on_a_gpu(tiny_folder("llama")), Reference(tiny_folder("llama")))
    trace_ = trace(setup.backend).forward._trace
    for home in (kv_rows, traced_forward):
        monkeypatch.setattr(home, "writes_in_place", lambda *_: True)
    # What is compiled runs when MLX likes, and these write at once.
    trace_.may_write, trace_._replay = True, trace_._forward
    moves: list[int] = []

    def move(keys: mx.array, values: mx.array, slots: mx.array, to: int) -> mx.array:
        moves.append(slots.size)
        return move_rows(keys, values, slots, to)

    monkeypatch.setattr(kv_rows, "write", write_rows)
    monkeypatch.setattr(kv_rows, "move", move)
    line = Line(setup, SAMPLINGS["greedy"])
    for played in SCRIPT:
        line.play(played)
    assert line.outcomes_hit >= 6
    assert moves
    setup.backend.close(line.number)


@examples(30, phases=(Phase.generate,))
@given(
    sampling=st.sampled_from(list(SAMPLINGS.values())),
    script=st.lists(rounds, min_size=1, max_size=8),
)
def test_random_rounds_equal_fresh_drafting(sampling: Sampling, script: list[Round]) -> None:
    """So are those of random fan-outs, depths, outcomes, interruptions and rewinds."""
    line = Line(setup_of("llama"), sampling)
    for played in script:
        line.play(played)
    setup_of("llama").backend.close(line.number)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_branches_behind_trees(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch, replayed: list[int]
) -> None:
    """A row behind a side row sees its own ancestors; runners-up are named beside each token."""
    monkeypatch.setattr(test_mlx_trees, "OPTIONS", LEAVES)
    setup, tree = setup_of("llama"), test_mlx_trees.FIRST
    line = test_mlx_trees.Line(setup, sampling)
    for place in (5, 3, 0):
        grown = line.prepare(tree, [row % 2 for row in range(len(tree))], 3)
        line.go_on(tree, grown.outcomes[place % len(grown.outcomes)])
        tree = test_mlx_trees.next_tree(grown, place % len(grown.outcomes), 9)
    assert set(replayed) == {8, 32}
    setup.backend.close(line.number)


def draft_in_turns(backend: MlxBackend, numbers: Sequence[int]) -> list[list[Tokens]]:
    """The tokens of each depth behind these prompts, a depth of one after one of another."""
    for number in numbers:
        list(backend.open(number, [7 * number + at for at in range(9)], SAMPLINGS["sampled"]))
    work = [backend.prepare(number, read_tree([120 + number, 7]), [3, 2], 3) for number in numbers]
    layers: list[list[Tokens]] = [[] for _ in numbers]
    for found in zip_longest(*work):
        for own, layer in zip(layers, found, strict=True):
            if layer is not None:
                own.append(layer.tokens)
    for number in numbers:
        backend.close(number)
    return layers


@pytest.mark.parametrize("sequences", [2, 5])
def test_sequences_are_replayed_one_by_one(sequences: int, replayed: list[int]) -> None:
    """They draft what each of them would draft alone."""
    together = draft_in_turns(setup_of("llama").backend, range(sequences))
    # The chain, three depths, and the last tokens.
    assert replayed.count(8) == 5 * sequences
    fresh = as_on_a_gpu(tiny_folder("llama"))
    for number, layers in enumerate(together):
        assert len(layers) == 3
        assert layers == draft_in_turns(fresh, [number])[0]


@pytest.mark.parametrize(("length", "used"), [(100, 5), (220, 5), (225, 4), (240, 0)])
@pytest.mark.parametrize("later", [False, True])
def test_what_goes_beyond_the_traced_slots(
    length: int, replayed: list[int], used: int, monkeypatch: pytest.MonkeyPatch, *, later: bool
) -> None:
    """Six branches of four tokens, with the padding of the last: 26 slots behind the chain,
    which is replayed, too; six more if the last tokens are fed as well. Where our kernels serve
    any length, traces are made when it comes to that."""
    monkeypatch.setattr(traced_forward, "TRACED_SLOTS", (256,))
    monkeypatch.setattr(traced_of("llama").forward, "_traces_later", later)
    prompt = [int(token) for token in np.random.default_rng(length).integers(5, 280, length)]
    drafts = []
    for backend in (setup_of("llama").backend, MlxBackend(tiny_folder("llama"), 512)):
        list(backend.open(1, prompt, Sampling()))
        layers = said(backend.prepare(1, read_tree([120, 7]), [3, 3], 4))
        drafts.append([(layer.outcomes, layer.tokens) for layer in layers])
        backend.close(1)
    assert drafts[0] == drafts[1]
    assert replayed == [8] + [8] * (5 if later else used)


def test_more_branches_than_any_trace_has_rows(replayed: list[int]) -> None:
    backend = setup_of("llama").backend
    list(backend.open(1, list(PROMPT), Sampling()))
    assert [len(one.tokens) for one in said(backend.prepare(1, read_tree([120]), [33], 2))] == [
        33,
        33,
    ]
    assert replayed == [1]  # the chain
    backend.close(1)


def test_forks_keep_their_own_tokens(replayed: list[int]) -> None:
    """A traced pass writes nothing into buffers that a cached prefix holds."""
    backend = setup_of("llama").backend
    list(backend.open(1, list(PROMPT), Sampling()))
    fork = backend._sequences[1].store.fork(len(PROMPT))
    before = [np.array(array) for array in fork.arrays]
    said(backend.prepare(1, read_tree([120, 7]), [3, 3], 4))
    said(backend.draft(1, 99, 4))
    assert replayed
    for array, held in zip(fork.arrays, before, strict=True):
        assert np.array_equal(np.array(array), held)
    backend.close(1)


# ---------------------------------------------------------------- what is not used


def test_a_trace_that_is_not_faster_is_not_used() -> None:
    backend = as_on_a_gpu(tiny_folder("llama"))
    assert trace(backend, worthwhile=0.0).forward.shapes == set()
    list(backend.open(1, list(PROMPT), Sampling()))
    assert len(said(backend.prepare(1, read_tree([120]), [3], 2, RoundOptions()))) == 2


def test_a_wrong_trace_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """The model gives other logits when it is traced."""
    backend = as_on_a_gpu(tiny_folder("llama"))
    assert backend.ahead is not None
    model = backend._runner.model

    def wrong(tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = model(tokens, cache=cache)
        return logits + 1.0 if hasattr(cache[0], "is_traced") else logits

    with patch.object(backend._runner, "model", wrong):
        assert trace(backend).forward.shapes == set()
    assert "from the usual result: not used" in caplog.text


@pytest.mark.parametrize("family", ["sliding", "gemma3"])
def test_windows_are_not_traced(family: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert trace(as_on_a_gpu(tiny_folder(family))).forward.shapes == set()
    assert "not used: nothing is traced for 1 rows" in caplog.text


def test_a_cpu_traces_nothing() -> None:
    backend = as_on_a_cpu(tiny_folder("llama"))
    run_all(backend.trace())
    assert backend.ahead is None


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_target_answers_the_same_with_such_drafts(
    sampling: Sampling, replayed: list[int]
) -> None:
    """A model that drafts for itself is nearly always hit, and the answer is plain decoding's."""
    length, backend = 40, as_on_a_gpu(tiny_folder("llama"))
    trace(backend)
    replayed.clear()
    line = Lockstep(
        Verifier(load(tiny_folder("llama")), 512),
        backend,
        list(PROMPT),
        Limits(length, frozenset(), 0),
        num_draft_tokens=3,
        sampling=sampling,
    )
    statistics = line.run()
    assert line.sequence.tokens[len(PROMPT) :] == plain("llama", PROMPT, length, sampling)
    assert statistics.rounds < length / 2
    assert {1, 8, 32} & set(replayed) > {1}


def test_what_may_be_asked_for_is_compiled_at_load() -> None:
    """No, two and four runners-up, with noise and without: nobody waits for that in an answer."""
    ahead = setup_of("llama").backend.ahead
    assert ahead is not None
    assert ahead.traced is not None
    compiled = dict(ahead.traced._choices)
    logits = mx.random.normal((8, ahead.ids.size), key=mx.random.key(0))
    for width in (1, 3, 5):
        for sampling in (Sampling(), Sampling(temperature=0.7, seed=1)):
            rules = mx.array(write_rules(range(8), sampling))
            drawn = sampling.temperature > 0.0
            best, found = ahead.traced.choose(logits, width, rules, drawn=drawn)
            expected = guess(logits, width, ahead.ids, rules, sampling)
            np.testing.assert_array_equal(np.array(best), np.array(expected[0]))
            np.testing.assert_allclose(np.array(found), np.array(expected[1]), atol=1e-5)
    assert ahead.traced._choices == compiled
