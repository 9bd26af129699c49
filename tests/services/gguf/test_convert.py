"""GGUF files become mlx-lm folders with the same weights, tokens and answers."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from tokenizers import Tokenizer

from protocol.decoding.vocabulary import read_vocabulary
from protocol.errors import ModelError
from services.gguf.blocks import PACKED_KINDS, bits_of, is_exact, pack
from services.gguf.convert import REPORT, convert
from services.gguf.file import GGUFFile
from services.mlx.loader import load
from tests.support.gguf_file import write_gguf
from tests.support.reference import tiny_folder
from tests.support.tiny_models import EOS, SPECIAL_TOKENS, write_tiny_model

TOKENS = mx.array([[0, 2, 97, 41, 250, 33, 8]])
Q = GGMLQuantizationType
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a tiny model as `m.gguf`."""

    def write(family: str = "llama", kind: Q = Q.F32, **more: Any) -> Path:
        path = tmp_path / "m.gguf"
        write_gguf(path, tiny_folder(family), kind, **more)
        return path

    return write


def converted(file: Path, **options: Any) -> Path:
    folder = file.parent / "converted"
    convert(file, folder, **options)
    return folder


def logits(folder: Path) -> mx.array:
    module: Any = load(folder).module
    return module(TOKENS)


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear": ("linear", {}),
    "mixtral": (
        "llama",
        {
            "model_type": "mixtral",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": (
        "qwen2",
        {
            "model_type": "qwen2_moe",
            "shared_expert_intermediate_size": 32,
            "tie_word_embeddings": False,
            **_EXPERTS,
        },
    ),
    "qwen3": ("qwen3", {}),
    "yarn": ("yarn", {}),
    "qwen3_moe": ("moe", {"mlp_only_layers": []}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "phi3": ("llama", {"model_type": "phi3", "tie_word_embeddings": False}),
}


def test_converted_models_compute_the_same(tmp_path: Path) -> None:
    """Names, order of rows, norms and configuration of each family come out as they went in."""
    for name, (family, config) in FAMILIES.items():
        folder = write_tiny_model(tmp_path / name, family, config=config)
        write_gguf(tmp_path / f"{name}.gguf", folder)
        convert(tmp_path / f"{name}.gguf", tmp_path / f"{name}-converted")
        expected, found = logits(folder), logits(tmp_path / f"{name}-converted")
        assert mx.allclose(found, expected, rtol=1e-4, atol=1e-4), name
        assert read_vocabulary(tmp_path / f"{name}-converted") == read_vocabulary(folder)


def test_llama_3_scales_its_rope(tmp_path: Path) -> None:
    """The table of divisors becomes Llama 3's parameters; another table is refused."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    folder = write_tiny_model(tmp_path / "m", "llama", config={"rope_scaling": scaling})
    lengths = 2 * np.pi * 10000.0 ** (np.arange(0, 16, 2) / 16)
    share = np.clip((8192 / lengths - 1.0) / 3.0, 0.0, 1.0)
    table = (1.0 / ((1.0 - share) / 8.0 + share)).astype(np.float32)
    assert table.max() > 1.0
    file = tmp_path / "m.gguf"
    write_gguf(file, folder, tensors={"rope_freqs.weight": table})
    assert json.loads((converted(file) / "config.json").read_text())["rope_scaling"] == scaling
    write_gguf(file, folder, tensors={"rope_freqs.weight": table * 1.5})
    with pytest.raises(ModelError, match="not Llama 3's"):
        convert(file, tmp_path / "other")


@pytest.mark.parametrize("kind", sorted(PACKED_KINDS), ids=lambda kind: kind.name)
def test_packed_weights_are_those_of_the_file(kind: Q) -> None:
    """MLX reads the library's own weights out of each type of blocks, or the nearest."""
    size, length = GGML_QUANT_SIZES[kind]
    noise = np.random.default_rng(kind.value)
    blocks = noise.integers(0, 256, (4 * 512 // size, length), np.uint8)
    k_quants = {Q.Q2_K: 80, Q.Q3_K: 108, Q.Q6_K: 208}
    start = k_quants.get(kind, 0)
    end = min(length, start + (4 if kind in {Q.Q2_K, Q.Q4_1, Q.Q5_1, Q.Q4_K, Q.Q5_K} else 2))
    scales = noise.normal(0, 0.01, (len(blocks), (end - start) // 2)).astype(np.float16)
    blocks[:, start:end] = scales.view(np.uint8)
    rows = blocks.reshape(4, -1)
    packed, off = pack(rows, kind)
    found = mx.dequantize(
        mx.array(packed.codes.view(np.uint32)),
        mx.array(packed.scales),
        mx.array(packed.biases),
        group_size=32,
        bits=bits_of(kind),
    )
    expected = dequantize(rows, kind)
    difference = np.abs(np.array(found) - expected).max()
    if is_exact(kind):
        assert difference == 0.0
        return
    assert difference == pytest.approx(off.largest, rel=1e-3)
    assert 0 < (off.squares / off.power) ** 0.5 < 0.006


def test_quantised_layers_keep_their_bits(make: Make) -> None:
    """Matrices stay packed, config.json names their bits, and the report says what was done."""
    folder = converted(make(kind=Q.Q5_0))
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 5}
    report = json.loads((folder / REPORT).read_text())
    assert report["types"]["Q5_0"]["kept"] == "5 bits, groups of 32, scales F32"
    assert report["types"]["Q5_0"]["layers"] == []
    dense = file_logits(folder)
    assert mx.allclose(logits(converted(folder.parent / "m.gguf", dense=True)), dense, atol=1e-4)


def file_logits(folder: Path) -> mx.array:
    result = logits(folder)
    mx.eval(result)
    for path in folder.iterdir():
        path.unlink()
    return result


def test_the_tokenizer_ends_and_begins_as_the_file_says(make: Make) -> None:
    """BOS, the ends of answers, special tokens and the template come from the metadata."""
    metadata = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 3}
    folder = converted(make(metadata=metadata))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("the fox").ids[0] == 0
    assert tokenizer.encode("</s>", add_special_tokens=False).ids == [EOS]
    assert tokenizer.decode(tokenizer.encode("the fox").ids) == "the fox"
    assert {t.content for t in tokenizer.get_added_tokens_decoder().values()} >= set(SPECIAL_TOKENS)
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [EOS, 3]


PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    "<0xC3>",
    "<0xA9>",
    "▁",
    "a",
    "b",
    "ab",
    "▁a",
    "▁ab",
    "ba",
    "[PAD11]",
]
SCORES = [0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -3.0, -1.0, -4.0, 0.0]
TYPES = [2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 1, 5]
SENTENCE_PIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def test_sentence_pieces_are_merged_by_their_scores(make: Make) -> None:
    """The best score merges first, spaces are ▁, unknown characters become bytes."""
    folder = converted(make(metadata=SENTENCE_PIECE))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cases = {
        "aba": [1, 10, 6],  # "▁ab" scores more than "ba"
        "a b": [1, 9, 5, 7],
        "é": [1, 5, 3, 4],
        "</s>b": [1, 2, 5, 7],
    }
    assert {text: tokenizer.encode(text).ids for text in cases} == cases
    assert tokenizer.decode([9, 5, 7]) == "a b"
    assert tokenizer.token_to_id("[PAD11]") is None


REFUSED = {
    "architecture 'mamba'": {"general.architecture": "mamba"},
    "one of 3 parts": {"split.count": 3},
    "is a model of embeddings": {"llama.pooling_type": 3},
    "is an adapter": {"general.type": "adapter"},
    "lacks the metadata 'llama.block_count'": {"llama.block_count": None},
    "lacks the metadata 'tokenizer.ggml.tokens'": {"tokenizer.ggml.tokens": None},
    "lacks the metadata 'tokenizer.ggml.merges'": {"tokenizer.ggml.merges": None},
    "says that it has 7 layers": {"llama.block_count": 7},
    "kind 'bert'": {"tokenizer.ggml.model": "bert"},
    "the way 'bloom'": {"tokenizer.ggml.pre": "bloom"},
    "eos_token_id .* is 5000": {"tokenizer.ggml.eos_token_id": 5000},
    "not as many types": {"tokenizer.ggml.token_type": [1, 1]},
    "which cannot be converted": {
        "llama.rope.scaling.type": "odd",
        "llama.rope.scaling.factor": 2.0,
    },
    "embedding_length does not fit the tensor 'token_embd": {"llama.embedding_length": 96},
    "feed_forward_length does not fit the": {"llama.feed_forward_length": 32},
    "head_count does not fit": {"llama.attention.head_count": 8},
}


def test_what_cannot_be_converted_is_named(make: Make) -> None:
    """Each is a ModelError that says what is in the way, and leaves nothing behind."""
    for sentence, metadata in REFUSED.items():
        file = make(metadata=metadata)
        with pytest.raises(ModelError, match=sentence):
            converted(file)
    with pytest.raises(ModelError, match=r"'blk\.0\.odd\.weight' has no place"):
        converted(make(tensors={"blk.0.odd.weight": np.ones((2, 32), np.float32)}))


def test_other_files_are_refused(tmp_path: Path, make: Make) -> None:
    """A missing, empty or foreign file, and one that ends early, is a ModelError that names it."""
    whole = make().read_bytes()
    contents = [b"", b"GG", b"nonsense" * 99, b"GGUF" + b"\xff" * 400, b"PK\3\4" + bytes(99)]
    contents += [whole[:size] for size in (5, 20, 24, 100, 2000, len(whole) - 1000)]
    for content in contents:
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=r"m\.gguf"):
            converted(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"there is no file .*no\.gguf"):
        converted(tmp_path / "no.gguf")


def test_overlapping_tensors_are_refused(make: Make) -> None:
    """Two tensors in the same bytes are a ModelError that names both."""
    file = make()
    first, second = sorted(GGUFFile(file).tensors, key=lambda one: one.data_offset)[:2]
    data = bytearray(file.read_bytes())
    place = second.field.offset + 8 + len(second.name) + 4 + 8 * len(second.shape) + 4
    data[place : place + 8] = bytes(8)
    file.write_bytes(data)
    with pytest.raises(ModelError, match=f"'{first.name}' and '{second.name}' overlap"):
        converted(file)


def test_no_mutation_gets_past_the_reader(make: Make) -> None:
    """Bytes that are changed at random give a model or a ModelError, in no time and space."""
    original = make("qwen2").read_bytes()
    head = GGUFFile(make("qwen2")).data_offset
    file = make("qwen2")
    chance = random.Random(7)  # noqa: S311  # the same mutations each time
    refused = 0
    for _ in range(150):
        data = bytearray(original)
        for _ in range(chance.choice((1, 2, 8))):
            place = chance.randrange(head)
            data[place] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        file.write_bytes(data)
        folder = file.parent / "converted"
        try:
            convert(file, folder)
        except ModelError:
            refused += 1
        for path in folder.iterdir() if folder.is_dir() else ():
            path.unlink()
    assert refused > 20


def test_the_command_reports_in_one_line(tmp_path: Path) -> None:
    """A failure is one line on stderr and the exit code of a ModelError."""
    module = "services.gguf.convert"
    command = [sys.executable, "-m", module, str(tmp_path / "m.gguf"), str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ModelError.exit_code
    assert done.stderr.startswith("error: there is no file")
    assert len(done.stderr.splitlines()) == 1
