"""States caught from an mlx-lm model: whole, and without changing it."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.errors import ModelError
from services.mlx.loader import load
from services.mlx.patches import Patch, install, remove
from services.mlx.taps import Taps
from tests.support.tiny_models import write_tiny_model

TOKENS = mx.array([[5, 9, 200, 31, 7]])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_tap_catches_what_the_layer_returns(family: str, tmp_path: Path) -> None:
    """The logits stay as they are, and the last layer's state ends in them."""
    model = load(write_tiny_model(tmp_path, family)).module
    plain = np.array(model(TOKENS))
    last = len(model.layers) - 1
    taps = Taps(model, [0, last])
    np.testing.assert_array_equal(np.array(model(TOKENS)), plain)
    first, state = taps.take()
    assert first.shape == state.shape == (1, 5, model.model.norm.weight.shape[0])
    taps.remove()
    np.testing.assert_array_equal(np.array(model(TOKENS)), plain)
    assert not hasattr(model.layers[0], "tap")


def test_taps_may_be_lifted(tmp_path: Path) -> None:
    """Meanwhile layers are as they were; what they get then lies below the tap afterwards."""
    model = load(write_tiny_model(tmp_path, "llama")).module
    plain = type(model.layers[1])
    taps = Taps(model, [1])
    kernel = Patch(model.layers[1], lambda below: type("Other", (below,), {}), {"number": 7})
    with taps.lift():
        assert type(model.layers[1]) is plain
        install([kernel])
    model(TOKENS)
    assert len(taps.take()) == 1
    assert [parent.__name__ for parent in type(model.layers[1]).__mro__[:2]] == [
        "TappedOther",
        "Other",
    ]
    taps.remove()
    assert type(model.layers[1]).__name__ == "Other"
    remove([kernel])
    assert type(model.layers[1]) is plain
    assert not hasattr(model.layers[1], "number")


def test_states_are_taken_once(tmp_path: Path) -> None:
    """Features of a run that has not happened are refused."""
    model = load(write_tiny_model(tmp_path, "llama")).module
    taps = Taps(model, [1])
    model(TOKENS)
    features = taps.features()
    mean = np.array((features * features).mean(axis=-1))
    np.testing.assert_allclose(mean, 1.0, rtol=1e-3)
    with pytest.raises(RuntimeError, match="not run"):
        taps.take()


@pytest.mark.parametrize(("layers", "message"), [([], "cannot be read"), ([0, 99], "layers 0 to")])
def test_layers_must_exist(layers: list[int], message: str, tmp_path: Path) -> None:
    """A number beyond the last layer is an error that names what there is."""
    model = load(write_tiny_model(tmp_path, "llama")).module
    with pytest.raises(ModelError, match=message):
        Taps(model, layers)


def test_a_layer_beside_the_stream_is_refused(tmp_path: Path) -> None:
    """Where states also flow past the layers, a tap would catch a part: the proof fails."""
    model = load(write_tiny_model(tmp_path, "llama")).module
    body: Any = model.model
    plain = body.norm

    class Leak:
        """Adds to the last state what the first layer's input was."""

        def __call__(self, x: mx.array) -> mx.array:
            found: mx.array = plain(x + body.seen)
            return found

    class Embed:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, ids: mx.array) -> mx.array:
            body.seen = self.inner(ids)
            return body.seen

        def as_linear(self, x: mx.array) -> mx.array:
            logits: mx.array = self.inner.as_linear(x)
            return logits

    body.embed_tokens, body.norm = Embed(body.embed_tokens), Leak()
    with pytest.raises(ModelError, match="whole state"):
        Taps(model, [1])
    assert not hasattr(model.layers[1], "tap")
