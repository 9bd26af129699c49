"""Folders of published heads with random weights, for tiny targets."""

import json
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.support.head_reference import Array, Tensors

WIDTH, INNER, SIZE = 64, 96, 16
"""Of the tiny targets, which heads must fit."""


def tensor(seed: str, *shape: int, gain: float = 1.0) -> Array:
    """Random numbers that are a function of the name; rows of length `gain`, a norm near 1."""
    normal = np.random.default_rng(zlib.crc32(seed.encode())).standard_normal(shape)
    scaled = 1.0 + 0.2 * normal if len(shape) == 1 else normal * gain / shape[-1] ** 0.5
    return scaled.astype(np.float32).astype(np.float64)


def layer(prefix: str, inputs: int, *, norms: bool = False, gated: bool = False) -> Tensors:
    """Attention of 4 heads over 2, and an MLP."""
    p, a = prefix, f"{prefix}self_attn."
    found = {
        f"{a}q_proj.weight": tensor(f"{p}q", (2 if gated else 1) * 4 * SIZE, inputs, gain=2.0),
        f"{a}k_proj.weight": tensor(f"{p}k", 2 * SIZE, inputs, gain=2.0),
        f"{a}v_proj.weight": tensor(f"{p}v", 2 * SIZE, inputs),
        f"{a}o_proj.weight": tensor(f"{p}o", WIDTH, 4 * SIZE, gain=2.0),
        f"{p}input_layernorm.weight": tensor(f"{p}in", WIDTH),
        f"{p}post_attention_layernorm.weight": tensor(f"{p}post", WIDTH),
        f"{p}mlp.gate_proj.weight": tensor(f"{p}gate", INNER, WIDTH),
        f"{p}mlp.up_proj.weight": tensor(f"{p}up", INNER, WIDTH),
        f"{p}mlp.down_proj.weight": tensor(f"{p}down", WIDTH, INNER, gain=2.0),
    }
    if norms:
        found |= {f"{a}{n}_norm.weight": tensor(f"{p}{n}n", SIZE) for n in ("q", "k")}
    return found


def base_config(vocabulary: int) -> dict[str, Any]:
    """What the heads' configs have in common."""
    return {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
    }


def write_head(
    folder: Path, config: dict[str, Any], tensors: Tensors, metadata: dict[str, str] | None = None
) -> Path:
    """Write a head as it would be published."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        name: mx.array(a.astype(np.int64 if name == "d2t" else np.float32))
        for name, a in tensors.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata or {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def eagle3(
    vocabulary: int, *, layers: list[int], trimmed: int = 0, **more: Any
) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of an EAGLE-3 head.

    Args:
        vocabulary: the target's.
        layers: whose inputs it reads; empty: the default ones.
        trimmed: rows of its own output head; 0: as many as the target's.
        more: entries of the config.
    """
    config = base_config(vocabulary) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": trimmed or vocabulary,
        **more,
    }
    count = len(layers) or 3
    if layers:
        config["eagle_aux_hidden_state_layer_ids"] = layers
    tensors = {
        "fc.weight": tensor("fc", WIDTH, count * WIDTH),
        "norm.weight": tensor("norm", WIDTH),
        "midlayer.hidden_norm.weight": tensor("hidden", WIDTH),
        "lm_head.weight": tensor("head", trimmed or vocabulary, WIDTH, gain=4.0),
        **layer("midlayer.", 2 * WIDTH),
    }
    if more.get("norm_before_fc"):
        tensors["input_norm.weight"] = tensor("input", count * WIDTH)
    if more.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": tensor(f"fcn{i}", WIDTH) for i in range(count)}
    if trimmed:
        ids = np.sort(np.random.default_rng(1).permutation(vocabulary)[:trimmed])
        tensors["d2t"] = (ids - np.arange(trimmed)).astype(np.float64)
    return config, tensors


def mtp() -> Tensors:
    """The MTP layer of a tiny target, norms less one, as Qwen stores them."""
    plain = {
        "mtp.fc.weight": tensor("mfc", WIDTH, 2 * WIDTH, gain=1.5),
        "mtp.pre_fc_norm_embedding.weight": tensor("pe", WIDTH),
        "mtp.pre_fc_norm_hidden.weight": tensor("ph", WIDTH),
        "mtp.norm.weight": tensor("mn", WIDTH),
        **layer("mtp.layers.0.", WIDTH, norms=True, gated=True),
    }
    return {name: a - 1.0 if "norm" in name else a for name, a in plain.items()}


def dflash(
    vocabulary: int, name: str, *, layers: list[int], count: int, **more: Any
) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of a DFlash, DFlash 2 or DSpark head of two layers.

    Args:
        vocabulary: the target's.
        name: dflash, dflash2 or dspark.
        layers: whose outputs it reads.
        count: layers of the target.
        more: entries of the config.
    """
    block: dict[str, Any] = {
        "block_size": 8,
        "mask_token_id": vocabulary - 1,
        "target_layer_ids": layers,
    }
    if name == "dflash2":
        block |= {"conv_kernel_size": 2, "conv_group_size": 16}
        block |= {"selector_rank": 8, "selector_top_k": 16}
    kinds = {
        "dflash": "DFlashDraftModel",
        "dflash2": "DFlash2DraftModel",
        "dspark": "Qwen3DSparkModel",
    }
    config = base_config(vocabulary) | {
        "architectures": [kinds[name]],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": count,
        **(block | {"markov_rank": 8} if name == "dspark" else {"dflash_config": block}),
        **more,
    }
    tensors = {
        "fc.weight": tensor("fc", WIDTH, len(layers) * WIDTH),
        "hidden_norm.weight": tensor("hn", WIDTH),
        "norm.weight": tensor("n", WIDTH),
    }
    for index in range(2):
        prefix = f"layers.{index}."
        tensors |= layer(prefix, WIDTH, norms=True)
        if name == "dflash2":
            tensors |= convolutions(prefix)
    if name == "dflash2":
        tensors |= {
            f"candidate_selector.{n}_codebook": tensor(n, vocabulary, 8, gain=2.0)
            for n in ("predecessor", "successor")
        }
        tensors["candidate_selector.hidden_projection.weight"] = tensor("sel", 8, WIDTH, gain=2.0)
    if name == "dspark":
        tensors |= {
            "markov_head.markov_w1.weight": tensor("w1", vocabulary, 8, gain=2.0),
            "markov_head.markov_w2.weight": tensor("w2", vocabulary, 8, gain=2.0),
            "confidence_head.proj.weight": tensor("conf", 1, WIDTH + 8),
            "confidence_head.proj.bias": tensor("confb", 1),
        }
    return config, tensors


def convolutions(prefix: str) -> Tensors:
    """Those of one layer of DFlash 2: two taps, groups of 16."""
    found = {}
    for name in ("attention_conv", "mlp_conv"):
        base = tensor(f"{prefix}{name}", 2 * 2 * WIDTH).reshape(2, 2, WIDTH)
        found[f"{prefix}{name}.base_kernel"] = base * 0.7
        rows = 2 * 2 * (WIDTH // 16)
        found[f"{prefix}{name}.kernel_projection.weight"] = tensor(f"{prefix}{name}k", rows, WIDTH)
    return found
