"""A drafter that starts from an earlier one, of as many layers or fewer."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from protocol.errors import ModelError
from services.distill.phases import distill
from services.mlx.loader import load
from tests.services.distill.test_training import Quiet, settings_for
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("t"), "llama")


def test_a_drafter_grows_from_one_of_fewer_layers(tmp_path: Path) -> None:
    """It begins as that drafter: the layers between its first and its last ones add nothing."""
    target = write_tiny_model(tmp_path / "target", "llama", layers=6)
    small = settings_for(
        target, tmp_path / "small", layers=3, steps=3, precision="float32", data_tokens=800
    )
    distill(small, Quiet())
    grown = settings_for(
        target, tmp_path / "grown", layers=5, steps=1, learning_rate=1e-12, precision="float32",
        data_tokens=800,
        init_drafter=str(tmp_path / "small"),
    )  # fmt: skip
    distill(grown, Quiet())
    tokens = mx.array([[5, 9, 2, 30, 7, 11]])
    few, more = (load(tmp_path / name).module for name in ("small", "grown"))
    assert (len(few.layers), len(more.layers)) == (3, 5)
    np.testing.assert_allclose(np.array(more(tokens)), np.array(few(tokens)), atol=1e-2)
    assert np.abs(np.array(more.layers[2].self_attn.q_proj.weight)).max() > 0


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of two layers."""
    folder = tmp_path_factory.mktemp("drafter") / "a"
    distill(settings_for(target, folder, layers=2, steps=3, data_tokens=800), Quiet())
    return folder


def test_a_drafter_of_more_layers_is_refused(target: Path, drafter: Path, tmp_path: Path) -> None:
    """Growing adds layers; none is left out."""
    again = settings_for(
        target, tmp_path / "b", layers=1, steps=1, data_tokens=800, init_drafter=str(drafter)
    )
    with pytest.raises(ModelError, match="give --layers 2"):
        distill(again, Quiet())


def test_a_drafter_can_be_trained_further(target: Path, drafter: Path, tmp_path: Path) -> None:
    """`init_drafter` starts from a drafter's own weights: no step leaves them as they were."""
    again = settings_for(
        target, tmp_path / "b", layers=2, steps=1, learning_rate=1e-12, data_tokens=800,
        init_drafter=str(drafter),
    )  # fmt: skip
    distill(again, Quiet())
    one, other = (mx.load(str(run / "model.safetensors")) for run in (drafter, tmp_path / "b"))
    assert isinstance(one, dict)
    assert isinstance(other, dict)
    for key, array in one.items():
        np.testing.assert_allclose(np.array(other[key]), np.array(array), atol=1e-3)
