"""Published heads are told from models, and refused where they do not fit the target."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import ModelError
from protocol.heads import describe_head
from protocol.safetensors import read_header
from tests.support.tiny_models import vocabulary_size, write_tiny_model
from tests.support.write_heads import eagle3, mtp, write_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("t"), "llama", layers=8)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("q"), "qwen3_5")


def written(folder: Path, **changes: Any) -> Path:
    """An EAGLE-3 head with these entries in its config."""
    config, tensors = eagle3(vocabulary_size(), layers=[])
    return write_head(folder, config | changes, tensors)


def test_a_model_is_no_head(target: Path, qwen: Path, tmp_path: Path) -> None:
    """Nor is a folder without a config."""
    assert describe_head(target, target) is None
    assert describe_head(qwen, qwen) is None
    assert describe_head(tmp_path, target) is None


def test_layers_of_eagle3_are_counted_in_two_ways(target: Path, tmp_path: Path) -> None:
    """At the top, of layers that states enter; nested, or as a conversion left them, of those
    that they leave."""
    default = describe_head(written(tmp_path / "a"), target)
    assert default is not None
    assert (default.format, default.layers) == ("eagle3", [1, 3, 4])
    name = "eagle_aux_hidden_state_layer_ids"
    named = describe_head(written(tmp_path / "b", **{name: [2, 5, 7]}), target)
    nested = describe_head(written(tmp_path / "c", eagle_config={name: [1, 4, 6]}), target)
    carried = describe_head(written(tmp_path / "d", **{name: [1, 3, 4]}), target)
    assert named is not None
    assert nested is not None
    assert carried is not None
    assert named.layers == nested.layers == [1, 4, 6]
    assert carried.layers == [1, 3, 4]


def test_the_speculators_packaging_is_read(target: Path, tmp_path: Path) -> None:
    """It nests the layer's config and calls the layer layers.0."""
    config, tensors = eagle3(vocabulary_size(), layers=[])
    outer = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": vocabulary_size(),
        "transformer_layer_config": config | {"architectures": ["LlamaModel"]},
    }
    description = describe_head(write_head(tmp_path, outer, tensors), target)
    assert description is not None
    assert (description.format, description.config["num_attention_heads"]) == ("eagle3", 4)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": 99}, "its vocabulary has 99 rows"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 40]}, "the target has 0 to 7"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5]}, "96 numbers, and the target's have 64"),
        ({"num_target_layers": 12}, "made for 12 layers, and the target has 8"),
        ({"architectures": ["DFlash"]}, "lacks 'target_layer_ids'"),
        ({"eagle_aux_hidden_state_layer_ids": ["x"]}, "is wrong"),
        ({"architectures": ["DFlash"], "dflash_config": "x"}, "is wrong"),
        ({"vocab_size": float("inf")}, "is wrong"),
    ],
)
def test_what_differs_is_named(
    target: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    """A head for another target is refused with what differs."""
    with pytest.raises(ModelError, match=told):
        describe_head(written(tmp_path, **changes), target)


@pytest.mark.parametrize("text", ['{"architectures": 5}', "[" * 100_000, "5"])
def test_what_is_no_config_is_no_head(target: Path, tmp_path: Path, text: str) -> None:
    """Names that are no list, brackets without end: other checks of the folder have their say."""
    head = written(tmp_path)
    (head / "config.json").write_text(text)
    assert describe_head(head, target) is None


def test_all_differences_are_named_at_once(qwen: Path, tmp_path: Path) -> None:
    """So that nobody fixes one after the other."""
    with pytest.raises(ModelError) as refused:
        describe_head(written(tmp_path, vocab_size=99, num_target_layers=12), qwen)
    assert "vocabulary" in str(refused.value)
    assert "12 layers" in str(refused.value)


def test_mtp_is_for_its_own_family_and_size(target: Path, qwen: Path, tmp_path: Path) -> None:
    """Another family, or another number of layers, is refused."""
    config = json.loads((qwen / "config.json").read_text("utf-8"))
    head = write_head(tmp_path / "h", config, mtp())
    description = describe_head(head, qwen)
    assert description is not None
    assert (description.format, description.layers) == ("mtp", [2])
    with pytest.raises(ModelError, match=r"Qwen 3\.5 family, and the target is 'llama'"):
        describe_head(head, target)
    deeper = write_tiny_model(tmp_path / "deep", "qwen3_5", layers=4)
    with pytest.raises(ModelError, match="made for 3 layers, and the target has 4"):
        describe_head(head, deeper)


def test_a_checkpoint_with_mtp_layers_drafts_for_itself_only(qwen: Path, tmp_path: Path) -> None:
    """For a target of another size it is a model like any other."""
    import mlx.core as mx  # noqa: PLC0415  # the arrows keep it out of this room's code

    both = write_tiny_model(tmp_path / "both", "qwen3_5")
    more = {n: mx.array(a.astype(np.float32)) for n, a in mtp().items()}
    mx.save_safetensors(str(both / "more.safetensors"), more, {"format": "mlx"})
    description = describe_head(both, qwen)
    assert description is not None
    assert description.format == "mtp"
    larger = write_tiny_model(tmp_path / "larger", "qwen3_5", layers=4)
    assert describe_head(both, larger) is None


def test_weights_that_would_run_code_are_refused(target: Path, tmp_path: Path) -> None:
    """A head whose weights are no safetensors."""
    head = written(tmp_path)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no safetensors"):
        describe_head(head, target)


def test_broken_files_are_named(target: Path, tmp_path: Path) -> None:
    """Weights that are cut off, or claim absurd sizes."""
    head = written(tmp_path)
    (head / "model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        describe_head(head, target)
    with pytest.raises(ValueError, match="claims a header"):
        read_header(head / "model.safetensors")
