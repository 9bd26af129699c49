"""A Llama GGUF file becomes the mlx-lm folder that it was made from."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from launch.models.default_pair import produce
from protocol.decoding.vocabulary import read_vocabulary
from protocol.errors import ModelError
from services.mlx.loader import compute_unit, load
from services.tools.gguf import convert, main
from tests.support.gguf_file import metadata_of, rounded, tensors_of, write_gguf
from tests.support.reference import tiny_folder
from tests.support.tiny_models import write_tiny_model

TOKENS = mx.array([[0, 2, 97, 41, 250, 33, 8]])
TEXT = "the quick brown fox costs 1234 dollars; <|user|>grüße</s> 世界"

Make = Callable[..., Path]

on_cpu = pytest.mark.skipif(compute_unit() != "cpu", reason="weights are changed on CPUs only")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a GGUF file of a tiny Llama; `metadata` replaces entries, None removes them."""

    def write(
        family: str = "llama",
        *,
        kind: str = "F32",
        split: str = "gpt-2",
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, Any] | None = None,
        others: dict[str, str] | None = None,
    ) -> Path:
        said = metadata_of(tiny_folder(family), split=split) | (metadata or {})
        held = tensors_of(tiny_folder(family)) | (tensors or {})
        write_gguf(
            tmp_path / "m.gguf",
            {key: value for key, value in said.items() if value is not None},
            {name: value for name, value in held.items() if value is not None},
            kind,
            others or {},
        )
        return tmp_path / "m.gguf"

    return write


def converted(source: Path) -> Path:
    folder = source.parent / "converted"
    convert(source, folder)
    return folder


def logits_of(folder: Path) -> npt.NDArray[np.float32]:
    return np.array(load(folder).module(TOKENS).astype(mx.float32))


def tensors_in(folder: Path) -> dict[str, mx.array]:
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    weights: dict[str, mx.array] = loaded
    return weights


def encoded(folder: Path, text: str) -> list[int]:
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    return ids


def test_the_original_model_comes_back(make: Make) -> None:
    """Every tensor has its name, shape and order again, so the logits are the source's."""
    source, folder = tiny_folder("llama"), converted(make())
    expected, found = tensors_in(source), tensors_in(folder)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(np.array(value), np.array(found[name]), err_msg=name)
    np.testing.assert_array_equal(logits_of(source), logits_of(folder))


def test_a_head_of_its_own_is_kept(make: Make, tmp_path: Path) -> None:
    """A file with an output tensor becomes a model with an untied head."""
    source = write_tiny_model(tmp_path / "s", "llama3", config={"rope_scaling": None})
    file = make("llama3")
    folder = converted(file)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(logits_of(source), logits_of(folder))


def test_the_configuration_comes_back(make: Make) -> None:
    """All that shapes the model is read from the metadata."""
    expected = json.loads((tiny_folder("llama") / "config.json").read_text())
    found = json.loads((converted(make()) / "config.json").read_text())
    assert found.pop("architectures") == ["LlamaForCausalLM"]
    assert found.pop("rms_norm_eps") == pytest.approx(expected.pop("rms_norm_eps"))
    assert expected == found


@on_cpu
@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_dequantised_on_a_cpu(kind: str, make: Make) -> None:
    """Each block format gives float32 weights with the values that the format stands for."""
    folder = converted(make(kind=kind))
    config = json.loads((folder / "config.json").read_text())
    assert "quantization" not in config
    found = tensors_in(folder)
    assert {value.dtype for value in found.values()} == {mx.float32}
    for name, value in tensors_in(tiny_folder("llama")).items():
        stored = np.array(value)
        expected = rounded(stored, kind) if stored.ndim == 2 else stored
        np.testing.assert_allclose(expected, np.array(found[name]), atol=2e-6, err_msg=name)


def test_blocks_are_halves_on_cuda(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense float16: the values of the blocks, rounded once."""
    monkeypatch.setattr("services.tools.gguf.compute_unit", lambda: "cuda")
    found = tensors_in(converted(make(kind="Q4_1")))
    assert {value.dtype for value in found.values()} == {mx.float16}
    weight = np.array(tensors_in(tiny_folder("llama"))["model.layers.0.mlp.up_proj.weight"])
    expected = rounded(weight, "Q4_1").astype(np.float16)
    np.testing.assert_allclose(
        expected, np.array(found["model.layers.0.mlp.up_proj.weight"]), atol=2e-3
    )


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_kept_elsewhere(kind: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where quantised kernels are fast the blocks stay, and mlx-lm computes the same with them."""
    expected = logits_of(converted(make(kind=kind)))
    monkeypatch.setattr("services.tools.gguf.compute_unit", lambda: "metal")
    folder = converted(make(kind=kind))
    assert "model.layers.0.self_attn.q_proj.scales" in tensors_in(folder)
    module: Any = load_model(folder)[0]
    module.set_dtype(mx.float32)
    found = np.array(module(TOKENS))
    np.testing.assert_allclose(expected, found, atol=2e-3 * np.abs(expected).max())


def test_widths_may_differ(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer keeps its own width, and mlx-lm is told of it."""
    kinds = {"token_embd.weight": "Q8_0", "blk.0.ffn_up.weight": "Q8_0"}
    expected = logits_of(converted(make(kind="Q4_0", others=kinds)))
    monkeypatch.setattr("services.tools.gguf.compute_unit", lambda: "metal")
    folder = converted(make(kind="Q4_0", others=kinds))
    said = json.loads((folder / "config.json").read_text())["quantization"]
    wide = {"group_size": 32, "bits": 8}
    assert said == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": wide,
        "model.layers.0.mlp.up_proj": wide,
    }
    module: Any = load_model(folder)[0]
    module.set_dtype(mx.float32)
    found = np.array(module(TOKENS))
    np.testing.assert_allclose(expected, found, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("split", ["gpt-2", "default"])
def test_the_tokenizer_comes_back(split: str, make: Make) -> None:
    """Text and special tokens become the same ids as with the source's tokenizer."""
    source, folder = tiny_folder("llama"), converted(make(split=split))
    assert read_vocabulary(source) == read_vocabulary(folder)
    assert encoded(source, TEXT) == encoded(folder, TEXT)
    expected = json.loads((source / "tokenizer_config.json").read_text())
    found = json.loads((folder / "tokenizer_config.json").read_text())
    assert expected == found


@pytest.mark.parametrize(("split", "joined"), [("smollm", 0), ("gpt-2", 1), ("default", 1)])
def test_smollm_keeps_digits_apart(split: str, joined: int, make: Make) -> None:
    """SmolLM's digits stay single although a merge could join them; others' are joined."""
    said = metadata_of(tiny_folder("llama"), split=split)
    tokens = [*said["tokenizer.ggml.tokens"][:-1], "12"]
    merges = [*said["tokenizer.ggml.merges"][:-1], "1 2"]
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    folder = converted(make(split=split, metadata=changed))
    expected = ["x", "12"] if joined else ["x", "1", "2"]
    assert encoded(folder, "x12") == [tokens.index(token) for token in expected]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    """A missing file is a ModelError that names it, and nothing is written."""
    with pytest.raises(ModelError, match=r"there is no file .*m\.gguf"):
        converted(tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


CUTS = [0, 3, 8, 24, 100, 2000, -1000, -100_000]


@pytest.mark.parametrize("size", CUTS)
def test_torn_files_are_refused(size: int, make: Make) -> None:
    """A file that ends early, wherever, is a ModelError that names it."""
    file = make()
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"m\.gguf"):
        converted(file)


@pytest.mark.parametrize(
    "content", [b"nonsense" * 100, b"GGUF" + b"\xff" * 400], ids=["text", "ff"]
)
def test_nonsense_is_refused(content: bytes, tmp_path: Path) -> None:
    """What is not GGUF is a ModelError that names the file."""
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf"):
        converted(tmp_path / "m.gguf")


def test_other_architectures_are_refused(make: Make) -> None:
    """Only Llama is converted; the message says what the file holds."""
    with pytest.raises(ModelError, match="is a 'gemma' model; only 'llama' can be converted"):
        converted(make(metadata={"general.architecture": "gemma"}))
    with pytest.raises(ModelError, match="is a None model"):
        converted(make(metadata={"general.architecture": None}))


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.model": "llama"},
        {"tokenizer.ggml.pre": "llama-bpe"},
        {"tokenizer.ggml.pre": None},
    ],
    ids=str,
)
def test_other_tokenizers_are_refused(metadata: dict[str, Any], make: Make) -> None:
    """A tokenizer that cannot be rebuilt is a ModelError that names its kind."""
    with pytest.raises(ModelError, match=r"tokenizers of kind .* are not handled"):
        converted(make(metadata=metadata))


@pytest.mark.parametrize(
    "key",
    [
        "llama.block_count",
        "llama.attention.head_count_kv",
        "llama.rope.freq_base",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.eos_token_id",
    ],
)
def test_missing_metadata_is_refused(key: str, make: Make) -> None:
    """A file that does not say what is needed is a ModelError that names what is missing."""
    with pytest.raises(ModelError, match=key.rpartition(".")[2]):
        converted(make(metadata={key: None}))


def test_unknown_tensors_are_refused(make: Make) -> None:
    """A tensor without a place in a Llama is a ModelError that names it."""
    for name in ("rope_freqs.weight", "blk.0.attn_q_norm.weight"):
        with pytest.raises(ModelError, match=rf"'{name}' has no place in a Llama model"):
            converted(make(tensors={name: np.ones(8, np.float32)}))


def test_the_command_converts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m services.tools.gguf SOURCE FOLDER` writes the folder and exits with 0."""
    file = make()
    monkeypatch.setattr(sys, "argv", ["gguf", str(file), str(file.parent / "converted")])
    assert main() == 0
    assert load(file.parent / "converted").vocabulary.size == 288


def test_the_command_reports_in_one_line(tmp_path: Path) -> None:
    """A failure is one line on stderr and the exit code of a ModelError."""
    command = [sys.executable, "-m", "services.tools.gguf", str(tmp_path / "m.gguf"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ModelError.exit_code
    assert done.stderr.startswith("error: there is no file")
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_kills_its_reader_is_refused(make: Make, tmp_path: Path) -> None:
    """Found by fuzzing: MLX's reader dies of a wrong count of tensors; that is a ModelError."""
    file = make()
    data = bytearray(file.read_bytes())
    data[10] = 1  # 65536 tensors more
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"was ended by signal|failed"):
        produce(tmp_path / "converted", "services.tools.gguf", str(file))
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
