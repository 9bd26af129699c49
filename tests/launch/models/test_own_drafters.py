"""Drafters that travel with ssd: each is used for its target alone."""

import json
from pathlib import Path

import pytest

from launch.models.own_drafters import find_own_drafter, find_shipped_weights
from launch.models.pair import pair_of
from launch.models.registry import read_registry
from launch.settings.settings import StackSettings
from protocol.errors import UsageError


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of models."""
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def _put(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def test_a_target_drafts_with_its_own_drafter_once_that_is_set_up(models: Path) -> None:
    """Without it, drafts are looked up."""
    _put(models / "coder")
    before = pair_of(StackSettings(model="coder"))
    assert (before.backend, before.draft_model) == ("ngram", "")
    drafter = _put(models / "coder-drafter")
    after = pair_of(StackSettings(model="coder"))
    assert (after.backend, after.draft_model) == ("mlx", str(drafter))
    assert pair_of(StackSettings(model="coder", draft_backend="ngram")).draft_model == ""


def test_a_folder_of_the_same_name_elsewhere_has_none(models: Path, tmp_path: Path) -> None:
    """It may be any model."""
    _put(models / "coder-drafter")
    other = _put(tmp_path / "elsewhere" / "coder")
    assert find_own_drafter(other) is None
    assert pair_of(StackSettings(model=str(other))).backend == "ngram"
    with pytest.raises(UsageError, match="give --draft-model"):
        pair_of(StackSettings(model=str(other), draft_backend="mlx"))


def test_each_shipped_drafter_is_complete(models: Path) -> None:
    """Its layers, its head and its licence are there, at most 40 MB, for a model we know."""
    targets = [models / name for name in read_registry() if find_own_drafter(models / name)]
    assert len(targets) == 2
    for target in targets:
        folder = find_shipped_weights(target)
        config = json.loads((folder / "config.json").read_text())
        head = json.loads((folder / "draft_head.json").read_text())
        assert len(set(head)) == len(head)
        assert max(head) < config["vocab_size"]
        assert (folder / "README.md").is_file()
        assert (folder / "LICENSE").is_file()
        assert (folder / "model.safetensors").stat().st_size < 40e6
