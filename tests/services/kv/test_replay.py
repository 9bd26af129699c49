"""Recurrences computed again for the first rows of a pass."""

import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gated_delta, mamba2, qwen3_next, ssm

from services.kv.recording import Recording, start_recording
from services.kv.replay import install_hooks
from services.mlx.loader import load
from tests.support.reference import tiny_folder


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def delta_arguments(rows: int) -> dict[str, Any]:
    names = {"q": (2, 16), "k": (2, 16), "v": (4, 16), "a": (4,), "b": (4,)}
    found = {n: random(1, rows, *s, seed=i) for i, (n, s) in enumerate(names.items())}
    return found | {"A_log": random(4), "dt_bias": random(4), "state": random(1, 4, 16, 16)}


def ssm_arguments(rows: int) -> dict[str, Any]:
    """As a layer has them: columns of what it convolved and projected."""
    shapes = {"hidden_states": (24, 64), "B": (1, 128), "C": (1, 128), "dt": (24,)}
    ends = [24 * 64, 25 * 64 + 64, 26 * 64 + 128]
    columns = mx.split(random(1, rows, ends[-1] + 24), ends, axis=-1)
    found = {
        name: column.reshape(1, rows, *shape)
        for (name, shape), column in zip(shapes.items(), columns, strict=True)
    }
    weights = {"A_log": random(24), "D": random(24), "dt_bias": random(24)}
    return found | weights | {"state": random(1, 24, 64, 128), "time_step_limit": (0.0, 100.0)}


def first_rows(arguments: dict[str, Any], rows: slice) -> dict[str, Any]:
    """Laid out as in a pass over these rows alone."""
    timed = ("q", "k", "v", "a", "b", "hidden_states", "B", "C", "dt")
    return {n: mx.contiguous(a[:, rows]) if n in timed else a for n, a in arguments.items()}


@pytest.fixture(autouse=True)
def hooks() -> None:
    """In the modules of two models; they stay, as in a service."""
    install_hooks(load(tiny_folder("qwen3_next")).module)
    install_hooks(load(tiny_folder("mamba2")).module)


CASES = [
    (qwen3_next, gated_delta.gated_delta_update, delta_arguments),
    (mamba2, ssm.ssm_update, ssm_arguments),
]


@pytest.mark.parametrize(("home", "update", "arguments"), CASES, ids=["delta net", "Mamba-2"])
def test_a_replay_has_the_bits_of_single_steps(home: Any, update: Any, arguments: Any) -> None:
    """After each number of rows, the state that so many calls would have left."""
    given = arguments(6)
    hooked = vars(home)[update.__name__]
    recording = start_recording()
    out, state = hooked(**given)
    recording.stop()
    call = recording.call_of(state)
    assert call is not None
    step = given["state"]
    for row in range(6):
        one = first_rows(given, slice(row, row + 1)) | {"state": step}
        single, step = update(**one)
        assert bool(mx.array_equal(call.state_after(row + 1), step))
        assert bool(mx.array_equal(out[:, row], single[:, 0]))


def test_mamba2_rounds_differently_for_several_tokens() -> None:
    """Which is why a chain is walked: mlx-lm's own form is close to single steps, not equal."""
    given = ssm_arguments(6)
    own, _ = ssm.ssm_update(**given)
    start_recording()
    walked, _ = vars(mamba2)["ssm_update"](**given)
    distance = float(mx.abs(own - walked).max())
    assert 0.0 < distance < 1e-4


def test_nothing_is_recorded_outside_a_pass() -> None:
    recording = start_recording()
    recording.stop()
    given = delta_arguments(3)
    vars(qwen3_next)["gated_delta_update"](**given)
    assert recording.calls == []
    other = start_recording()
    recording.stop()  # of a pass that is over: the other goes on
    vars(qwen3_next)["gated_delta_update"](**given)
    other.stop()
    assert (len(recording.calls), len(other.calls)) == (0, 1)


def test_a_convolution_notes_its_input() -> None:
    convolution = nn.Conv1d(4, 4, 3, groups=4)
    assert install_hooks(convolution) == [convolution]
    given = random(1, 8, 4)
    recording: Recording = start_recording()
    found = convolution(given)
    recording.stop()
    assert recording.convolved == {id(convolution): given}
    assert found.shape == (1, 6, 4)


def test_the_hooks_know_mlx_lms_arguments() -> None:
    """A version of mlx-lm that renames them would be replayed wrongly."""
    delta = inspect.signature(gated_delta.gated_delta_update).parameters
    assert {"q", "k", "v", "a", "b", "state", "mask"} <= delta.keys()
    mamba = inspect.signature(ssm.ssm_update).parameters
    assert {"hidden_states", "B", "C", "dt", "state", "mask", "lengths"} <= mamba.keys()
