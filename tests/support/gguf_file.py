"""Writes small models as GGUF files, with the writer and the names of the library `gguf`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH, TokenType
from gguf.quants import quantize

from tests.support.tiny_models import BOS, CONTEXT, EOS, SPECIAL_TOKENS

Floats = npt.NDArray[np.float32]
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "phi3": MODEL_ARCH.PHI3,
}
_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "rope_factor",
    "rope.scaling.original_context_length": "rope_original",
    "context_length": "max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def write_gguf(
    path: Path,
    folder: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Floats] | None = None,
) -> None:
    """Write the model in `folder` as a GGUF file, its matrices in the given kind.

    Args:
        path: the file.
        folder: an mlx-lm model of a family in `ARCHITECTURES`.
        kind: one that the library can write.
        metadata: instead of what the model says; None leaves a key out.
        tensors: more of them, under GGUF's names.
    """
    said = {**metadata_of(folder), **(metadata or {})}
    writer = GGUFWriter(path, str(said.pop("general.architecture")))
    for key, value in said.items():
        if value is not None:
            _add(writer, key, value)
    for name, value in {**tensors_of(folder), **(tensors or {})}.items():
        if value.ndim < 2 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def metadata_of(folder: Path) -> dict[str, Any]:
    """The metadata of a GGUF file for the model in `folder`."""
    config = json.loads((folder / "config.json").read_text())
    name = {
        "mixtral": "llama",
        "qwen2_moe": "qwen2moe",
        "qwen3_moe": "qwen3moe",
        "gemma3_text": "gemma3",
    }
    architecture = name.get(config["model_type"], config["model_type"])
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in {"linear", "yarn"}:
        config["rope_type"], config["rope_factor"] = scaling["rope_type"], scaling["factor"]
        config["rope_original"] = scaling.get("original_max_position_embeddings", CONTEXT)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    types = [TokenType.CONTROL if t in SPECIAL_TOKENS else TokenType.NORMAL for t in tokens]
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{k}": config[v] for k, v in _KEYS.items() if v in config},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["merges"]],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.chat_template": template,
    }


def tensors_of(folder: Path) -> dict[str, Floats]:
    """The weights of the model in `folder` under GGUF's names, in llama.cpp's order of rows."""
    config = json.loads((folder / "config.json").read_text())
    names = get_tensor_name_map(ARCHITECTURES[config["model_type"]], config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    tensors: dict[str, Floats] = {}
    for key, value in loaded.items():
        layer, _, leaf = key.rpartition(".")
        name = names.get_name(_published(layer))
        assert name is not None, key
        rows = np.array(value, np.float32)
        part = name.split(".")[-1]
        if config["model_type"] in {"llama", "mixtral"} and part in heads:
            rows = _interleaved(rows, heads[part])
        if "gemma" in config["model_type"] and name.endswith("norm"):
            rows = rows + np.float32(1.0)
        tensors[f"{name}.{leaf}"] = rows
    return tensors


def _published(layer: str) -> str:
    """The name that the library knows; mlx-lm has its own for stacked experts."""
    if "block_sparse_moe.switch_mlp" in layer:
        for ours, theirs in {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.items():
            layer = layer.replace(ours, theirs)
    return layer.replace("switch_mlp", "experts")


def _interleaved(rows: Floats, heads: int) -> Floats:
    """The order for RoPE over neighbouring pairs, in which llama.cpp has the rows of a head."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case str():
            writer.add_string(key, value)
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_array(key, value)
