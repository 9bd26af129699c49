"""`python -m services.tools.gguf SOURCE.gguf FOLDER`: a Llama GGUF file as an mlx-lm folder.

The quantised blocks are kept as they are (Q4_0, Q4_1 and Q8_0 are MLX's affine groups of
32), so the folder is as small and as exact as the file; where dense weights are faster, they
are dequantised once here instead of at every start: float32 on a CPU, and float16 on CUDA (an
H200 takes 11 ms to verify 5 tokens of SmolLM2-135M with quantised kernels, 7 without).

Three things differ in GGUF and are undone: tensor names; the rows of q and k, which it
orders for interleaved RoPE; and the tokenizer, which it stores as lists in the metadata.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from protocol.errors import ModelError
from services.mlx.loader import compute_unit

_GROUP_SIZE = 32
_DENSE = {"cpu": mx.float32, "cuda": mx.float16}
_CONTROL_TOKEN = 3

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}

# Text splitting before byte-level BPE, by GGUF's name for it. SmolLM2 is GPT-2's with
# single digits.
_SPLITS_DIGITS = {"smollm": True, "gpt-2": False, "default": False}


def convert(source: Path, folder: Path) -> None:
    """Write the mlx-lm model `folder` from the GGUF file `source`.

    Raises:
        ModelError: the file is missing, not GGUF, or not of a kind that is handled here.
    """
    weights, metadata = _read(source)
    try:
        _convert(source, folder, weights, metadata)
    except KeyError as error:
        raise ModelError(f"{str(source)!r} lacks the metadata {error}") from error


def _convert(
    source: Path, folder: Path, weights: dict[str, mx.array], metadata: dict[str, Any]
) -> None:
    if metadata.get("general.architecture") != "llama":
        kind = metadata.get("general.architecture")
        raise ModelError(f"{str(source)!r} is a {kind!r} model; only 'llama' can be converted")
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(metadata, weights)
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    tensors = {_name(key): _tensor(key, value, heads) for key, value in weights.items()}
    dense = _DENSE.get(compute_unit())
    if dense is not None:
        tensors = _dequantise(tensors, dense)
    elif bits := _bits(tensors):
        config["quantization"] = _quantization(bits)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    _write_json(folder / "config.json", config)
    _write_tokenizer(folder, metadata)


def _read(source: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    if not source.is_file():
        raise ModelError(f"there is no file {str(source)!r}")
    try:
        loaded: Any = mx.load(str(source), format="gguf", return_metadata=True)
    # MLX raises RuntimeError, ValueError or OSError, as the broken file leads it.
    except Exception as error:
        raise ModelError(f"{str(source)!r} is not a readable GGUF file: {error}") from error
    weights, metadata = loaded
    return weights, {key: _plain(value) for key, value in metadata.items()}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, mx.array) else value


def _name(key: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *path, leaf = key.split(".")
    try:
        if path[0] == "blk":
            return f"model.layers.{path[1]}.{_NAMES[path[2]]}.{leaf}"
        return f"{_NAMES[path[0]]}.{leaf}"
    except KeyError as error:
        raise ModelError(f"the GGUF tensor {key!r} has no place in a Llama model") from error


def _tensor(key: str, value: mx.array, heads: tuple[int, int]) -> mx.array:
    """The tensor with the rows of q and k back in half-split order."""
    for part, count in zip(("attn_q.", "attn_k."), heads, strict=True):
        if part in key:
            pairs = value.reshape(count, value.shape[0] // count // 2, 2, *value.shape[1:])
            return mx.contiguous(pairs.swapaxes(1, 2).reshape(value.shape))
    return value


def _dequantise(tensors: dict[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    result: dict[str, mx.array] = {}
    bits = _bits(tensors)
    for name, value in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight":
            continue
        scales = tensors.get(f"{layer}.scales")
        if scales is None:
            result[name] = value.astype(dtype)
            continue
        result[name] = mx.dequantize(
            value,
            scales.astype(mx.float32),
            tensors[f"{layer}.biases"].astype(mx.float32),
            group_size=_GROUP_SIZE,
            bits=bits[layer],
        ).astype(dtype)
    return result


def _config(metadata: dict[str, Any], weights: dict[str, mx.array]) -> dict[str, Any]:
    def of(name: str) -> Any:
        return metadata[f"llama.{name}"]

    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("rope.dimension_count"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "rope_theta": of("rope.freq_base"),
        "max_position_embeddings": of("context_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in weights,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
    }
    return config


def _bits(tensors: dict[str, mx.array]) -> dict[str, int]:
    """Layer -> bits per weight, for the layers that are quantised."""
    suffix = ".scales"
    layers = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    return {
        layer: tensors[f"{layer}.weight"].shape[1]
        * 32
        // (tensors[layer + suffix].shape[1] * _GROUP_SIZE)
        for layer in layers
    }


def _quantization(bits: dict[str, int]) -> dict[str, Any]:
    """What mlx-lm reads: the commonest width for all, and each layer that has another."""
    common = Counter(bits.values()).most_common(1)[0][0]
    others = {
        layer: {"group_size": _GROUP_SIZE, "bits": width}
        for layer, width in bits.items()
        if width != common
    }
    return {"group_size": _GROUP_SIZE, "bits": common, **others}


def _write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in _SPLITS_DIGITS:
        raise ModelError(f"tokenizers of kind {kind!r} with splitting {split!r} are not handled")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer: Any = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if _SPLITS_DIGITS[split] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in names.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            config[name] = tokens[number]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def main() -> int:
    """The command line of this module; reports like a child of the supervisor."""
    try:
        source, folder = sys.argv[1:]
        convert(Path(source), Path(folder))
    except ModelError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
