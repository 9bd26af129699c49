"""What is said of a model's layers before it is loaded."""

from pathlib import Path

import pytest

from protocol.errors import ModelError
from services.kv.rewinding import find_rewinding
from services.mlx.loader import load
from services.tools.layers import describe_layers
from tests.support.families.layered import LAYERED
from tests.support.reference import tiny_folder
from tests.support.tiny_models import FAMILIES


@pytest.mark.parametrize("family", [*FAMILIES, *LAYERED])
def test_what_is_said_before_is_what_is_found(family: str) -> None:
    """From the configuration alone, without the weights."""
    folder = tiny_folder(family)
    found = find_rewinding(load(folder).module, bucketed=False)
    assert found.description == describe_layers(folder).rewinding


def test_an_unknown_kind_of_model_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ModelError, match=r"the layers of .* are not known: .*abacus"):
        describe_layers(tmp_path)
