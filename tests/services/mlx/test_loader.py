"""Loading model folders: what is computed with, and what is said of broken ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from protocol.decoding.vocabulary import read_vocabulary
from protocol.errors import ModelError
from services.mlx.loader import compute_unit, load
from tests.support.reference import reference, tiny_folder
from tests.support.tiny_models import CONTEXT, FAMILIES, write_tiny_model

Edit = Callable[[Path], object]

TOKENS = mx.array([[0, 2, 97, 41, 250, 33, 8]])
on_cpu = pytest.mark.skipif(compute_unit() != "cpu", reason="weights are changed on CPUs only")


def logits_of(module: Any) -> Any:
    return np.array(module(TOKENS, cache=None).astype(mx.float32))


def edit_config(**entries: object) -> Edit:
    """Entries to replace in `config.json`; None removes."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | entries
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return edit


def write(name: str, content: bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(content)


def remove(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def cut(name: str, size: int) -> Edit:
    """Keep the first `format_bytes` bytes of a file; a negative size counts from its end."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def without_tensor(folder: Path) -> None:
    path = str(folder / "model.safetensors")
    weights: Any = mx.load(path)
    mx.eval(weights)
    del weights["model.layers.1.mlp.up_proj.weight"]
    mx.save_safetensors(path, weights)


BROKEN: dict[str, tuple[Edit, str]] = {
    "no folder": (shutil.rmtree, "there is no model folder at"),
    "no config": (remove("config.json"), "has no config.json"),
    "config is no JSON": (write("config.json", b'{"model_type": '), "is not JSON"),
    "config is no text": (write("config.json", b"\xff\xfe\x00"), "is not JSON"),
    "config is a list": (write("config.json", b"[]"), "is not JSON"),
    "config says nothing": (write("config.json", b"{}"), "cannot load the model"),
    "unknown architecture": (edit_config(model_type="no_such_model"), "no_such_model"),
    "no architecture": (edit_config(model_type=None), "cannot load the model"),
    "no hidden size": (edit_config(hidden_size=None), "hidden_size"),
    "sizes that do not fit": (edit_config(hidden_size=48), "cannot load the model"),
    "code of its own": (edit_config(model_file="evil.py"), "needs to run its own code"),
    "context is a word": (edit_config(max_position_embeddings="long"), "config.json|cannot load"),
    "context is negative": (edit_config(max_position_embeddings=-5), "config.json|cannot load"),
    "no weights": (remove("model.safetensors"), "No safetensors found"),
    "weights without a header": (cut("model.safetensors", 3), "cannot load the model"),
    "weights with half a header": (cut("model.safetensors", 100), "cannot load the model"),
    "weights with half the data": (cut("model.safetensors", -5000), "cannot load the model"),
    "weights are empty": (write("model.safetensors", b""), "cannot load the model"),
    "a tensor is missing": (without_tensor, "up_proj"),
    "no tokenizer": (remove("tokenizer.json"), "has no tokenizer.json"),
    "tokenizer is no JSON": (write("tokenizer.json", b"{"), "is not a tokenizer description"),
    "tokenizer without a model": (write("tokenizer.json", b"{}"), "is not a tokenizer"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    """Whatever is wrong, it is a ModelError of one line that says what and where."""
    edit, reason = BROKEN[case]
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "broken")
    edit(folder)
    with pytest.raises(ModelError, match=reason) as error:
        load(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("family", FAMILIES)
def test_models_compute_what_mlx_lm_computes(family: str) -> None:
    """A loaded model gives mlx-lm's logits, and knows its vocabulary and context length."""
    loaded = load(tiny_folder(family))
    expected = logits_of(reference(family).module)
    np.testing.assert_allclose(expected, logits_of(loaded.module), atol=1e-4)
    assert loaded.folder == tiny_folder(family)
    assert read_vocabulary(tiny_folder(family)) == loaded.vocabulary
    assert loaded.context_length == (0 if family == "mamba" else CONTEXT)


@on_cpu
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_becomes_float32_on_a_cpu(dtype: mx.Dtype, tmp_path: Path) -> None:
    """Every floating weight is widened, without loss."""
    folder = shutil.copytree(tiny_folder("llama3"), tmp_path / "half")
    path = str(folder / "model.safetensors")
    stored: Any = mx.load(path)
    half = {name: value.astype(dtype) for name, value in stored.items()}
    mx.eval(half)
    mx.save_safetensors(path, half)
    found = dict(tree_flatten(load(folder).module.parameters()))
    assert half.keys() == found.keys()
    for name, value in found.items():
        assert value.dtype == mx.float32
        np.testing.assert_array_equal(np.array(half[name].astype(mx.float32)), np.array(value))


WIDE = {"intermediate_size": 128}
QUANTIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "4 bits": ("llama", {"quantization": {"group_size": 32, "bits": 4}}),
    "8 bits": ("llama", {"quantization": {"group_size": 64, "bits": 8}, **WIDE}),
    "untied": ("llama3", {"quantization": {"group_size": 32, "bits": 4}}),
    "biases": ("qwen2", {"quantization": {"group_size": 32, "bits": 4}}),
    "mxfp4": ("llama", {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}),
    "gemma3": ("gemma3", {"quantization": {"group_size": 32, "bits": 4}}),
}


@on_cpu
@pytest.mark.parametrize("case", QUANTIZED)
def test_quantised_models_are_dequantised_on_a_cpu(case: str, tmp_path: Path) -> None:
    """No quantised layer is left, every weight is float32, and the logits are the same."""
    family, config = QUANTIZED[case]
    folder = write_tiny_model(tmp_path / "m", family, config=config)
    quantised: Any = load_model(folder)[0]
    kinds = [type(layer) for _, layer in quantised.named_modules()]
    assert nn.QuantizedLinear in kinds
    assert nn.QuantizedEmbedding in kinds
    module = load(folder).module
    kinds = [type(layer) for _, layer in module.named_modules()]
    assert not {nn.QuantizedLinear, nn.QuantizedEmbedding} & set(kinds)
    names = dict(tree_flatten(module.parameters()))
    assert {value.dtype for value in names.values()} == {mx.float32}
    assert not [name for name in names if name.endswith(("scales", "biases"))]
    expected = logits_of(quantised)
    np.testing.assert_allclose(expected, logits_of(module), atol=1e-4 * np.abs(expected).max())


def test_the_context_of_a_nested_configuration_is_found(tmp_path: Path) -> None:
    """A multimodal folder says it under `text_config`; none at all means any length."""
    for entries, expected in (
        ({"text_config": {"max_position_embeddings": 77}}, 77),
        ({"max_position_embeddings": 33}, 33),
        ({"max_position_embeddings": None}, 0),
    ):
        folder = tmp_path / str(expected)
        shutil.copytree(tiny_folder("llama"), folder)
        edit_config(**entries)(folder)
        assert expected == load(folder).context_length
