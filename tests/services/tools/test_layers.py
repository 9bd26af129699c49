"""What is said of a model's layers before it is loaded."""

from pathlib import Path

import pytest

from protocol.errors import ModelError
from services.kv.rewinding import find_rewinding
from services.mlx.loader import load
from services.tools.layers import describe_layers
from tests.support.families.layered import LAYERED
from tests.support.reference import tiny_folder
from tests.support.tiny_models import FAMILIES, write_tiny_model


@pytest.mark.parametrize("family", [*FAMILIES, *LAYERED])
def test_what_is_said_before_is_what_is_found(family: str) -> None:
    """From the configuration alone, without the weights."""
    folder = tiny_folder(family)
    found = find_rewinding(load(folder).module, bucketed=False)
    assert found.description == describe_layers(folder).rewinding


def test_weights_that_do_not_fit_are_a_sentence(tmp_path: Path) -> None:
    """A hybrid whose configuration is of other layers than its weights."""
    folder = write_tiny_model(tmp_path / "m", "qwen3_next")
    assert not describe_layers(folder).misfit
    config = folder / "config.json"
    text = config.read_text(encoding="utf-8")
    wider = text.replace('"linear_key_head_dim": 16', '"linear_key_head_dim": 32')
    config.write_text(wider, encoding="utf-8")
    assert "cannot load the model" in describe_layers(folder).misfit
    other = text.replace('"full_attention_interval": 2', '"full_attention_interval": 3')
    config.write_text(other, encoding="utf-8")
    assert "parameters not in model" in describe_layers(folder).misfit


def test_an_unknown_kind_of_model_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ModelError, match=r"the layers of .* are not known: .*abacus"):
        describe_layers(tmp_path)
