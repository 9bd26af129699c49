"""What must be the same on all ranks."""

from pathlib import Path

import msgspec
import pytest

from protocol.errors import ModelError
from services.ranks.build import build_of, difference, weights_digest
from tests.support.tiny_models import write_tiny_model


def test_equal_folders_have_one_digest(tmp_path: Path) -> None:
    """Whatever their names and dates are; other weights have another."""
    folders = [write_tiny_model(tmp_path / name, "llama", layers=1) for name in ("a", "b")]
    other = write_tiny_model(tmp_path / "c", "llama", layers=1, seed=1)
    digests = [weights_digest(folder) for folder in (*folders, other)]
    assert digests[0] == digests[1] != digests[2]


def test_another_configuration_is_another_model(tmp_path: Path) -> None:
    """The same weights may be computed with in another way."""
    folder = write_tiny_model(tmp_path / "a", "llama", layers=1)
    before = weights_digest(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("10000.0", "10001.0"))
    assert weights_digest(folder) != before


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """The same sentence reaches rank 0 from another machine."""
    with pytest.raises(ModelError, match=r"no model folder at '.*/nowhere'"):
        weights_digest(tmp_path / "nowhere")


@pytest.mark.parametrize("field", ["ssd", "mlx", "mlx_lm", "weights"])
def test_a_difference_names_both_values(field: str) -> None:
    """Each field counts."""
    own = build_of("")
    other = msgspec.structs.replace(own, **{field: "other"})
    assert difference(own, own) == ""
    assert "other" in difference(own, other)
