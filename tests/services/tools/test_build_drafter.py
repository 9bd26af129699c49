"""A drafter carried without its embedding becomes a whole model again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.decoding.vocabulary import read_vocabulary
from protocol.errors import ModelError
from services.mlx.loader import load
from services.tools.build_drafter import assemble, main
from tests.support.reference import tiny_folder
from tests.support.tiny_models import write_tiny_model

EMBEDDING = "model.embed_tokens.weight"
TOKENS = mx.array([[0, 2, 97, 41, 250]])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder("llama"), tmp_path / "target")


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """A model of two layers with the target's embedding, which is then left out."""
    folder = write_tiny_model(tmp_path / "carried", "llama", layers=2)
    weights = tensors(folder)
    del weights[EMBEDDING]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return folder


def tensors(folder: Path) -> dict[str, mx.array]:
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(loaded)
    weights: dict[str, mx.array] = loaded
    return weights


def logits_of(folder: Path) -> Any:
    return np.array(load(folder).module(TOKENS))


def test_the_assembled_model_is_the_whole_one(target: Path, carried: Path, tmp_path: Path) -> None:
    """With the target's embedding it computes what it did before it was taken apart."""
    folder = tmp_path / "new" / "draft"
    assemble(carried, target, folder)
    whole = write_tiny_model(tmp_path / "whole", "llama", layers=2)
    np.testing.assert_array_equal(logits_of(whole), logits_of(folder))
    assert read_vocabulary(target) == read_vocabulary(folder)
    assert tensors(folder).keys() == tensors(whole).keys()


def test_all_descriptions_travel(target: Path, carried: Path, tmp_path: Path) -> None:
    """Every JSON file of the drafter is copied; the tokenizer is the target's."""
    (carried / "draft_head.json").write_text("[5, 6]", encoding="utf-8")
    (carried / "tokenizer.json").write_text("{}", encoding="utf-8")
    folder = tmp_path / "draft"
    assemble(carried, target, folder)
    assert (folder / "draft_head.json").read_text() == "[5, 6]"
    assert (folder / "config.json").read_text() == (carried / "config.json").read_text()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_text() == (target / name).read_text()
    assert load(folder).module(TOKENS).shape == (1, 5, 288)


def test_assembling_again_replaces(target: Path, carried: Path, tmp_path: Path) -> None:
    """A folder that is there already is written over."""
    folder = tmp_path / "draft"
    assemble(carried, target, folder)
    expected = logits_of(folder)
    (folder / "model.safetensors").write_bytes(b"broken")
    assemble(carried, target, folder)
    np.testing.assert_array_equal(expected, logits_of(folder))


def test_only_the_embedding_is_the_targets(target: Path, carried: Path, tmp_path: Path) -> None:
    """All other tensors are the drafter's own, although the target has some of the same name."""
    assemble(carried, target, tmp_path / "draft")
    own, of_target = tensors(carried), tensors(target)
    for name, value in tensors(tmp_path / "draft").items():
        expected = of_target[name] if name == EMBEDDING else own[name]
        np.testing.assert_array_equal(np.array(expected), np.array(value))


@pytest.mark.parametrize("part", ["carried", "target"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense"], ids=str)
def test_missing_weights_are_refused(
    part: str, content: bytes | None, target: Path, carried: Path, tmp_path: Path
) -> None:
    """Weights that are missing or broken are a ModelError that names the file."""
    path = (carried if part == "carried" else target) / "model.safetensors"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match="cannot read the weights") as error:
        assemble(carried, target, tmp_path / "draft")
    assert str(path) in str(error.value)


def test_a_target_without_an_embedding_is_refused(
    target: Path, carried: Path, tmp_path: Path
) -> None:
    """A target whose embedding has another name cannot lend it."""
    shutil.copyfile(tiny_folder("mamba") / "model.safetensors", target / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no tensor model\.embed_tokens\.weight"):
        assemble(carried, target, tmp_path / "draft")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_target_without_a_tokenizer_is_refused(
    name: str, target: Path, carried: Path, tmp_path: Path
) -> None:
    """A missing part is a ModelError that names it."""
    (target / name).unlink()
    with pytest.raises(ModelError, match=name):
        assemble(carried, target, tmp_path / "draft")


def test_the_command_assembles(
    target: Path, carried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module, run as a program, writes the folder and exits with 0."""
    folder = tmp_path / "new" / "draft"
    monkeypatch.setattr(sys, "argv", ["assemble", str(carried), str(target), str(folder)])
    assert main() == 0
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2


def test_the_command_reports_in_one_line(target: Path, tmp_path: Path) -> None:
    """A failure is one line on stderr and the exit code of a ModelError."""
    missing = str(tmp_path / "nowhere")
    command = [sys.executable, "-m", "services.tools.build_drafter", missing, str(target), missing]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ModelError.exit_code
    assert done.stderr.startswith("error: cannot read the weights")
    assert len(done.stderr.splitlines()) == 1


def test_a_quantised_embedding_stays_so(target: Path, carried: Path, tmp_path: Path) -> None:
    """Where the target keeps its table in 8 bits of its own, the drafter has it in these bits."""
    weights: Any = mx.load(str(target / "model.safetensors"))
    table = weights.pop("model.embed_tokens.weight")
    names = ("weight", "scales", "biases")
    parts = zip(names, mx.quantize(table, group_size=32, bits=8), strict=True)
    weights |= {f"model.embed_tokens.{name}": array for name, array in parts}
    quantised = tmp_path / "quantised"
    shutil.copytree(target, quantised)
    mx.save_safetensors(str(quantised / "model.safetensors"), weights)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    own = {"model.embed_tokens": {"group_size": 32, "bits": 8}}
    config["quantization"] = {"group_size": 64, "bits": 4, **own}
    (quantised / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assemble(carried, quantised, tmp_path / "drafter")
    drafter = load(tmp_path / "drafter").module
    assembled = tensors(tmp_path / "drafter")
    assert [n for n in assembled if n.endswith("scales")] == ["model.embed_tokens.scales"]
    np.testing.assert_allclose(
        np.array(drafter.model.embed_tokens.weight),
        np.array(table.astype(mx.float32)),
        atol=0.02 * float(mx.abs(table).max()),
    )
