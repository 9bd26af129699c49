"""Prompts computed elsewhere: injected keys and values decode as the target's own."""

import time
from collections.abc import Iterable, Iterator

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("coremltools")

from launch.settings.settings import StackSettings
from launch.stack import session
from protocol.errors import ModelError
from protocol.messages import OpenSequence, Prefilled, Sampling, Tokens, Verify
from services.coreml.external_prefill import (
    Computed,
    ExternalPrefill,
    KVInjection,
    PrefillChoice,
    always,
    measure_times,
)
from services.coreml.prefill import CoremlPrefill, open_prefill
from services.kv.cache import KVStore
from services.mlx.loader import load
from services.verifier.verifier import Verifier
from tests.support.converted import SLOTS, converted_folder, converted_model, source_folder
from tests.support.stack import RunningStack, running

TEXT: Tokens = [int(t) for t in np.random.default_rng(5).integers(4, 280, 45)]


def prefill_of(family: str) -> CoremlPrefill:
    return CoremlPrefill(converted_model(converted_folder(family), "float16"))


def compute_externally(verifier: Verifier, family: str) -> None:
    module, other = verifier.target.verify, prefill_of(family)
    external = ExternalPrefill(module, verifier.new_state, other, whenever_it_fits=True)
    verifier.fill_externally = external.fill


def opened(verifier: Verifier, tokens: Tokens) -> None:
    request = OpenSequence(sequence=1, tokens=tokens, sampling=Sampling())
    messages = [message for message in verifier.handle(request) if message is not None]
    [told] = messages
    assert isinstance(told, Prefilled)
    assert told.length == len(tokens)


def decoded(verifier: Verifier, pending: int, position: int, count: int) -> Tokens:
    found = []
    for number in range(count):
        ask = Verify(sequence=1, round=number + 1, position=position + number, nodes=[pending])
        [outcome] = [message for message in verifier.handle(ask) if message is not None]
        pending = outcome.bonus
        found.append(pending)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_injected_prompts_decode_the_same_tokens(family: str) -> None:
    """A verifier whose prompt came from the package goes on as one that computed it."""
    answers = []
    for elsewhere in (False, True):
        verifier = Verifier(load(source_folder(family)), 512)
        if elsewhere:
            compute_externally(verifier, family)
        opened(verifier, TEXT[:-1])
        answers.append(decoded(verifier, TEXT[-1], len(TEXT) - 1, 24))
    assert answers[0] == answers[1]


def landed(pieces: Iterable[Computed], length: int, dtype: mx.Dtype, layers: int) -> KVStore:
    landing = KVInjection(length, dtype)
    for keys, values in pieces:
        landing.write(keys, values)
    store = KVStore([None] * layers, bucketed=False)
    landing.hand_over(store)
    return store


def test_injected_values_are_the_targets_own_but_for_float16() -> None:
    """Keys and values of every layer and token, within float16's rounding of the package."""
    module = load(source_folder("llama")).module
    store = KVStore([None] * 3, bucketed=False)
    store.chain(len(TEXT))
    module(mx.array([TEXT]), cache=store.caches)
    given = landed(prefill_of("llama").pieces(TEXT), len(TEXT), mx.float32, 3)
    assert given.length == len(TEXT)
    for own, other in zip(store.caches, given.caches, strict=True):
        for a, b in zip(own.state, other.state, strict=True):
            np.testing.assert_allclose(a[..., : len(TEXT), :], b[..., : len(TEXT), :], atol=0.06)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_rows_land_in_the_targets_type(dtype: mx.Dtype) -> None:
    """Piece after piece, rounded as MLX rounds; what the store appends leaves them alone."""
    rng = np.random.default_rng(2)
    drawn = rng.normal(size=(2, 2, 2, 2, 3, 4)).astype(np.float32)
    rows = [(keys, values) for keys, values in drawn]
    store = landed(rows, 6, dtype, 2)
    assert store.length == 6
    store.chain(1)
    more = mx.ones((1, 2, 1, 4), dtype)
    for layer, cache in enumerate(store.caches):
        for got, part in zip(cache.update_and_fetch(more, more), (0, 1), strict=True):
            given = np.concatenate([piece[part][layer] for piece in rows], axis=1)
            expected = mx.concatenate([mx.array(given).astype(dtype)[None], more], axis=2)
            assert got.dtype == dtype
            assert mx.array_equal(got, expected)


def test_a_store_begins_with_what_it_is_given_once() -> None:
    """Another number of layers is refused, and so is a store that holds tokens."""
    buffers = [(mx.ones((1, 1, 256, 4)), mx.ones((1, 1, 256, 4)))] * 2
    store = KVStore([None, None], bucketed=False)
    store.take(buffers, 3)
    with pytest.raises(ValueError, match="2 layers for 2 with 3"):
        store.take(buffers, 3)
    with pytest.raises(ValueError, match="1 layers for 2 with 0"):
        KVStore([None, None], bucketed=False).take(buffers[:1], 3)


def test_only_lengths_that_won_go_elsewhere() -> None:
    """Between two lengths the other way needs what the longer one needs, our own its share."""
    choice = PrefillChoice(500, {64: (10.0, 20.0), 256: (40.0, 22.0), 500: (80.0, 90.0)})
    expected = {0: False, 64: False, 65: False, 140: False, 142: True, 256: True, 257: False,
                500: False, 501: False}  # fmt: skip
    assert {length: choice.prefers_external(length) for length in expected} == expected
    # A shorter prompt than any measured: a whole chunk there, a share of it here.
    early = PrefillChoice(500, {64: (20.0, 10.0)})
    assert [early.prefers_external(n) for n in (0, 1, 32, 33, 64, 65)] == [
        False, False, False, True, True, False,
    ]  # fmt: skip
    assert [always(9).prefers_external(n) for n in (0, 1, 9, 10)] == [False, True, True, False]


def test_both_ways_are_timed_at_every_length() -> None:
    """Doubling lengths up to the longest; the verdict is of the times."""
    here: list[int] = []
    there: list[int] = []
    times = measure_times(here.append, there.append, 200)
    assert here == there
    assert sorted(set(here)) == [64, 128, 200]
    assert list(times) == [64, 128, 200]
    for length, (own, other) in times.items():
        assert PrefillChoice(200, times).prefers_external(length) == (other < own)


def test_measuring_ends_when_its_time_is_up() -> None:
    """The stack waits for it; prompts longer than what was measured stay here."""
    here: list[int] = []
    times = measure_times(here.append, lambda _: None, 4096, budget_s=0.0)
    assert list(times) == [64]
    assert set(here) == {64}
    assert not PrefillChoice(4096, times).prefers_external(65)


def test_a_first_run_that_compiles_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow: the second run tells what prompts will take. What loses clearly runs once."""
    clock, runs = [0.0], {"here": 0, "there": 0}
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def run(way: str, first: float, later: float) -> None:
        runs[way] += 1
        clock[0] += first if runs[way] == 1 else later

    def judged(here: tuple[float, float], there: tuple[float, float]) -> tuple[float, float]:
        runs.update(here=0, there=0)
        return measure_times(lambda _: run("here", *here), lambda _: run("there", *there), 64)[64]

    assert judged((9.0, 0.1), (0.5, 0.5)) == (pytest.approx(100), pytest.approx(500))
    assert judged((0.1, 0.1), (0.5, 0.5)) == (pytest.approx(100), pytest.approx(500))
    assert runs == {"here": 1, "there": 1}


def test_a_length_that_would_overspend_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the tokens, about twice the time: known before it is spent."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def slow(length: int) -> None:
        clock[0] += length / 64

    times = measure_times(lambda _: None, slow, 4096, budget_s=14.0)
    assert times == {64: (0.0, 1e3), 128: (0.0, 2e3), 256: (0.0, 4e3)}
    assert clock[0] == 7.0


def test_prompts_that_do_not_fit_are_computed_here() -> None:
    """Longer than the package's slots: the target's own way, no error."""
    verifier = Verifier(load(source_folder("llama")), 512)
    compute_externally(verifier, "llama")
    opened(verifier, [5] * (SLOTS + 10))


def test_another_models_package_is_refused() -> None:
    """Its keys would be garbage to the target."""
    with pytest.raises(ModelError, match="not a conversion of the target"):
        open_prefill(converted_folder("llama"), "reference", source_folder("qwen3"))


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    """A stack whose target's prompts go through CoreML; the folder is the one beside it."""
    source = source_folder("llama", layers=2)
    beside = source.with_name(f"{source.name}-coreml")
    if not beside.exists():
        beside.symlink_to(converted_folder("llama", layers=2))
    settings = StackSettings(
        model=str(source),
        draft_backend="ngram",
        prefill="coreml-always",
        compute_units="reference",
        prompt_cache_size=0,
    )
    with running(settings) as started:
        yield started


@pytest.mark.processes
def test_a_stack_with_prompts_from_coreml(stack: RunningStack) -> None:
    """Whole answers, speculating or not, are the same tokens."""
    plain = stack.answer("the quick brown fox jumps over", mode="ar", max_tokens=24).tokens
    answer = stack.answer("the quick brown fox jumps over", max_tokens=24)
    assert answer.tokens == plain


@pytest.mark.processes
def test_who_asks_for_another_prefill_gets_another_stack(stack: RunningStack) -> None:
    """A stack that runs cannot change how it computes prompts, nor where."""
    run_dir, model = stack.supervisor.run_dir, stack.client.status().model
    assert session._fits(run_dir, StackSettings(model=model))
    assert not session._fits(run_dir, StackSettings(model=model, prefill="coreml"))
    assert not session._fits(run_dir, StackSettings(model=model, compute_units="cpu_only"))
