"""Which way a model goes back after a rejected draft, and what happens where a way fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache

from protocol.errors import ModelError
from protocol.messages import OpenSequence, Sampling
from services.kv import replay
from services.kv.layered import LayeredState
from services.kv.recording import Tape
from services.kv.rewinding import find_rewinding
from services.kv.state import SequenceState
from services.mlx.loader import load
from services.verifier.verifier import Verifier
from tests.support.families.parts import WINDOW
from tests.support.reference import tiny_folder
from tests.support.tiny_models import write_tiny_model


class Wrapped:
    """A model whose caches or calls can be changed; hooks find nothing to hold on to."""

    def __init__(self, family: str) -> None:
        self.inner: Any = load(tiny_folder(family)).module
        self.make_cache: Callable[[], list[Any]] = lambda: make_prompt_cache(self.inner)
        self.alter: Callable[[mx.array, Any], mx.array] = lambda logits, cache: logits

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        return self.alter(self.inner(tokens, cache=cache), cache)

    def named_modules(self) -> list[tuple[str, Any]]:
        return []


def run(
    model: Any, state: SequenceState, tokens: list[int], stand: int, before: tuple[int, ...] = ()
) -> mx.array:
    """A pass; `before` are the tokens that stand, of which the last may have to be fed again."""
    length = state.length
    row = [*before[len(before) - state.owed :], *tokens]
    state.append(len(tokens))
    logits: mx.array = model(mx.array([row]), cache=state.caches)[0]
    state.commit(length + stand)
    return logits


def test_without_hooks_tokens_are_fed_again() -> None:
    found = find_rewinding(Wrapped("qwen3_5"), bucketed=False)
    assert found.way == "refeed"
    assert found.description == (
        "2 x recurrent, 1 x attention; accepted tokens are fed again after a rejection"
    )


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "mamba2"])
def test_a_pass_that_is_not_gone_back_into_is_not_recorded(family: str) -> None:
    """After the trial at load, a single token and a prompt: nothing would ever drop it."""
    model = load(tiny_folder(family)).module
    found = find_rewinding(model, bucketed=False)
    assert Tape.current is None
    state = found.make()
    state.append(2)
    assert Tape.current is not None
    model(mx.array([[1, 2]]), cache=state.caches)
    state.append(1)
    assert Tape.current is None
    model(mx.array([[3]]), cache=state.caches)
    state.append(4, whole=True)
    assert Tape.current is None


def test_a_replay_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves the state of one row less; the log says so."""
    right = replay.ReplayPlan.rewind
    monkeypatch.setattr(
        replay.ReplayPlan,
        "rewind",
        lambda self, caches, recording, keep: right(self, caches, recording, keep - 1),
    )
    found = find_rewinding(load(tiny_folder("qwen3_5")).module, bucketed=False)
    assert found.way == "refeed"
    assert "replay does not work for this model: after a rejected draft its logits are off" in (
        caplog.text
    )
    assert "fed again after a rejection: another way was tried, and after a rejected draft" in (
        found.description
    )


def test_a_model_that_looks_into_its_caches_gets_mlx_lms_own() -> None:
    """Its window layers must be rings; the tokens are fed again then."""
    model = Wrapped("gemma3")

    def alter(logits: mx.array, cache: Any) -> mx.array:
        assert isinstance(cache[0], RotatingKVCache)
        return logits

    model.alter = alter
    found = find_rewinding(model, bucketed=False)
    assert found.way == "refeed"
    assert type(found.make().caches[0]) is RotatingKVCache


def test_what_cannot_go_back_says_why() -> None:
    """A model that remembers beside its caches decodes plainly."""
    model = Wrapped("gemma3")
    seen: list[int] = []

    def alter(logits: mx.array, cache: Any) -> mx.array:
        seen.append(logits.shape[1])
        return logits + len(seen)

    model.alter = alter
    found = find_rewinding(model, bucketed=False)
    assert not found.rewinds
    assert found.description.startswith("2 x window of 8, 1 x attention; decoded plainly: ")
    assert "logits are off by" in found.description


def test_a_model_that_mlx_lm_cannot_run_here_is_a_sentence() -> None:
    """Some compute with kernels for Metal alone."""
    model = Wrapped("gemma3")

    def alter(logits: mx.array, cache: Any) -> mx.array:
        raise RuntimeError("[metal_kernel] No Metal back-end.")

    model.alter = alter
    with pytest.raises(ModelError, match=r"cannot run it on this machine: .*No Metal"):
        find_rewinding(model, bucketed=False)


def test_a_cache_that_holds_objects_cannot_be_copied() -> None:
    class Strange(ArraysCache):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(2)
            self.more = object()

    model = Wrapped("mamba")
    model.make_cache = lambda: [Strange() for _ in range(3)]
    found = find_rewinding(model, bucketed=False)
    assert not found.rewinds
    assert "a layer's Strange holds a object" in found.description


def test_a_verifier_of_such_a_model_takes_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kv.rewinding._Trial.proves", lambda *_: False)
    verifier = Verifier(load(tiny_folder("jamba")), 512)
    assert verifier.max_draft_tokens == 0
    list(verifier.handle(OpenSequence(sequence=1, tokens=[1, 2, 3], sampling=Sampling())))


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    """A hybrid whose configuration does not fit its weights: a sentence."""
    folder = write_tiny_model(tmp_path / "m", "qwen3_next")
    config = folder / "config.json"
    text = config.read_text().replace('"linear_key_head_dim": 16', '"linear_key_head_dim": 32')
    config.write_text(text)
    with pytest.raises(ModelError, match="cannot load the model"):
        load(folder)


def layered(family: str) -> tuple[Any, LayeredState]:
    model = load(tiny_folder(family)).module
    state = find_rewinding(model, bucketed=False).make()
    assert isinstance(state, LayeredState)
    return model, state


@pytest.mark.parametrize("family", ["qwen3_5", "jamba", "gpt_oss", "llama4"])
def test_a_fork_and_its_origin_know_nothing_of_one_another(family: str) -> None:
    model, state = layered(family)
    run(model, state, [1, 2, 3, 4, 5], 5)
    state.checkpoint()
    run(model, state, [6, 7, 8, 9], 2)
    held = state.length - state.owed
    forks = [state.fork(5), state.fork(held)]
    assert [fork.length for fork in forks] == [5, held]
    run(model, state, [11, 12], 2, before=(6, 7))
    fresh = find_rewinding(model, bucketed=False).make()
    run(model, fresh, [1, 2, 3, 4, 5], 5)
    expected = run(model, fresh, [6, 7, 30], 3)
    found = run(model, forks[0], [6, 7, 30], 3)
    assert bool(mx.allclose(expected, found, atol=1e-4))
    other = run(model, forks[1], [*[6, 7][held - 5 :], 30], 3 - (held - 5))
    assert bool(mx.allclose(expected[-1], other[-1], atol=1e-4))


def test_it_goes_back_no_further_than_its_pass() -> None:
    model, state = layered("jamba")
    run(model, state, [1, 2, 3], 3)
    state.append(2)
    model(mx.array([[4, 5]]), cache=state.caches)
    with pytest.raises(ValueError, match="cannot go back from 5 tokens to 2"):
        state.commit(2)
    with pytest.raises(ValueError, match="cannot go back from 5 tokens to 6"):
        state.commit(6)
    state.commit(3)
    assert (state.length, state.owed) == (3, 0)


def test_checkpoints_are_few_and_far_apart() -> None:
    model, state = layered("lfm2")
    for token in range(1, 13):
        run(model, state, [token], 1)
        state.checkpoint()
    held = [length for length in range(12) if state.resumable(length) == length]
    assert len(held) == 4
    assert held[0] == 0
    assert state.resumable(12) == 12


def test_the_end_of_the_last_message_stays() -> None:
    """However near the checkpoint behind it is."""
    model, state = layered("lfm2")
    for length in (4, 8, 9, 12, 16, 17, 20, 24, 25):
        run(model, state, [1] * (length - state.length), length - state.length)
        state.checkpoint(ends_turn=length in (9, 17))
    held = [length for length in range(1, 26) if state.resumable(length) == length]
    assert 17 in held
    assert 9 not in held
    assert len(held) == 4


def test_the_memory_of_a_window_model_does_not_grow_with_its_windows() -> None:
    """Its one full layer does."""
    model, state = layered("gpt_oss")
    sizes = []
    for _ in range(8):
        run(model, state, [7] * 200, 200)
        sizes.append(state.nbytes)
    grown = sizes[-1] - sizes[0]
    full_layer = state.bytes_per_token * (state.length - 200)
    assert 0.8 * full_layer <= grown <= 1.2 * full_layer
    assert WINDOW < 200
