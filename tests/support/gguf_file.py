"""Writes small GGUF files of Llama models, the way llama.cpp's converter does."""

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tests.support.tiny_models import BOS, EOS, SPECIAL_TOKENS

Floats = npt.NDArray[np.float32]

_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9
_ALIGNMENT = 32
_BLOCK = 32

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8}

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}

_CONTROL, _NORMAL = 3, 1


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, Floats],
    kind: str,
    others: dict[str, str],
) -> None:
    """Write a GGUF file, version 3; matrices in the given kind, vectors as F32.

    `others` names the kinds of matrices that have another one.
    """
    head, data = b"", b""
    for name, value in tensors.items():
        stored = others.get(name, kind) if value.ndim == 2 else "F32"
        blob = _encoded(value, stored)
        shape = struct.pack(f"<I{value.ndim}Q", value.ndim, *reversed(value.shape))
        head += _string(name) + shape + struct.pack("<IQ", TYPES[stored], len(data))
        data += blob + b"\0" * (-len(blob) % _ALIGNMENT)
    counts = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head = counts + b"".join(_string(key) + _value(v) for key, v in metadata.items()) + head
    path.write_bytes(head + b"\0" * (-len(head) % _ALIGNMENT) + data)


def metadata_of(folder: Path, *, split: str) -> dict[str, Any]:
    """What a GGUF file says of the Llama model in `folder`."""
    config = json.loads((folder / "config.json").read_text())
    described = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    types = [_CONTROL if token in SPECIAL_TOKENS else _NORMAL for token in tokens]
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    return {
        "general.architecture": "llama",
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.context_length": config["max_position_embeddings"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in described["merges"]],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.chat_template": template,
    }


def tensors_of(folder: Path) -> dict[str, Floats]:
    """The weights of the Llama model in `folder` under GGUF's names, q and k in its order."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    tensors: dict[str, Floats] = {}
    for name, value in loaded.items():
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)  # noqa: PLW2901  # one part after the other
        rows = np.array(value)
        part = name.split(".")[-2]
        tensors[name] = _interleaved(rows, heads[part]) if part in heads else rows
    return tensors


def _interleaved(rows: Floats, heads: int) -> Floats:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def rounded(values: Floats, kind: str) -> Floats:
    """The values as they come back out of a block format."""
    if kind in ("F32", "F16"):
        return values.astype(np.float16 if kind == "F16" else np.float32).astype(np.float32)
    scale, low, steps = _blocks(values, kind)
    if kind == "Q4_0":
        low = -8 * scale
    found: Floats = (steps * scale + low).astype(np.float32).reshape(values.shape)
    return found


def _blocks(values: Floats, kind: str) -> tuple[Any, Any, Any]:
    """Scale and minimum (float16 values), and integer steps, per block of 32."""
    blocks = values.reshape(-1, _BLOCK).astype(np.float64)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    if kind == "Q8_0":
        scale = (largest / 127).astype(np.float16).astype(np.float64)
        return scale, 0.0, np.clip(np.round(blocks / scale), -128, 127)
    if kind == "Q4_0":
        scale = (largest / 7).astype(np.float16).astype(np.float64)
        return scale, 0.0, np.clip(np.round(blocks / scale) + 8, 0, 15)
    low = blocks.min(axis=1, keepdims=True)
    scale = ((blocks.max(axis=1, keepdims=True) - low) / 15).astype(np.float16).astype(np.float64)
    low = low.astype(np.float16).astype(np.float64)
    return scale, low, np.clip(np.round((blocks - low) / scale), 0, 15)


def _encoded(values: Floats, kind: str) -> bytes:
    if kind == "F32":
        return values.astype("<f4").tobytes()
    if kind == "F16":
        return values.astype("<f2").tobytes()
    scale, low, steps = _blocks(values, kind)
    parts = [scale.astype("<f2").view(np.uint8)]
    if kind == "Q8_0":
        parts.append(steps.astype(np.int8).view(np.uint8))
    else:
        if kind == "Q4_1":
            parts.append(low.astype("<f2").view(np.uint8))
        nibbles = steps.astype(np.uint8)
        parts.append(nibbles[:, :16] | (nibbles[:, 16:] << 4))
    return np.concatenate(parts, axis=1).tobytes()


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    match value:
        case str():
            return struct.pack("<I", _STRING) + _string(value)
        case int():
            return struct.pack("<II", _UINT32, value)
        case float():
            return struct.pack("<If", _FLOAT32, value)
        case [str(), *_]:
            head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
            return head + b"".join(_string(item) for item in value)
        case _:
            head = struct.pack("<IIQ", _ARRAY, _INT32, len(value))
            return head + np.array(value, "<i4").tobytes()
