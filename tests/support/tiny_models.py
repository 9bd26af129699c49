"""Small random mlx-lm model folders, one per feature that the services must get right.

All families share one tokenizer, so any two of them make a pair. The weights are scaled so
that the laws are peaked: near ties, which rounding could decide, are rare. A model is a
function of its arguments alone, tensor by tensor: two models of one family and seed that
differ in `noise` are close, which makes a drafter whose tokens are often accepted.
"""

import json
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.families.layered import LAYERED
from tests.support.families.parts import WINDOW

Floats = npt.NDArray[np.float64]

CONTEXT = 512
"""`max_position_embeddings` of all families that have it."""

SPECIAL_TOKENS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
BOS, EOS = 0, 1

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_VOCABULARY_SIZE = 288
_CORPUS = ("the quick brown fox jumps over the lazy dog", "a draft that is right costs nothing")

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    # SmolLM2: the head is the embedding.
    "llama": {"model_type": "llama"},
    # Llama 3.x: a head of its own, scaled RoPE.
    "llama3": {"model_type": "llama", "rope_scaling": _LLAMA3, "tie_word_embeddings": False},
    "linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    # Full and sliding layers in turn.
    "sliding": {"model_type": "llama", "sliding_window": WINDOW},
    # Biases, and a head that is taller than the tokenizer.
    "qwen2": {"model_type": "qwen2", "vocab_size": 320},
    # Norms of queries and keys.
    "qwen3": {"model_type": "qwen3"},
    "yarn": {"model_type": "qwen3", "rope_scaling": _YARN},
    # Soft-capping: attention is written out and takes array masks only.
    "gemma2": {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
    },
    # Sliding layers with a RoPE base of their own.
    "gemma3": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "rope_theta": 100000.0,
        "rope_local_base_freq": 1000.0,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    # Inputs and heads of other sizes per layer, keys and values shared between layers, and a
    # position that is handed to RoPE as an array of no dimensions.
    "gemma4": {
        "model_type": "gemma4_text",
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": _VOCABULARY_SIZE,
        "num_kv_shared_layers": 1,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    # Experts.
    "moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    # Half of each head is rotated, pairs interleaved.
    "glm4": {
        "model_type": "glm4",
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    # 4 bits, groups of 32.
    "quantized": {"model_type": "llama", "quantization": {"group_size": 32, "bits": 4}},
    # A recurrent state.
    "mamba": {
        "model_type": "mamba",
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    # Recurrent layers among attention layers.
    "hybrid": {
        "model_type": "recurrent_gemma",
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    # RoPE with a base that depends on the length: fine for a target, refused as a drafter.
    "dynamic": {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
}

# Joint products, and a RoPE whose angles are stretched one by one over half of each head.
_JOINT: dict[str, dict[str, Any]] = {
    "phi3": {
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1, 2, 3, 4],
        },
    }
}

# Peaked attention, a peaked head, and blocks that outweigh the embedding: a model with a tied
# head would repeat its input otherwise.
_GAINS = {"q_proj": 2.0, "k_proj": 2.0, "in_proj": 3.0, "lm_head": 4.0} | dict.fromkeys(
    ("o_proj", "down_proj", "out_proj", "linear_out"), 2.0
)
_NORM_GAINS = {"q_norm": 0.5, "k_norm": 0.5, "post_feedforward_layernorm": 6.0}
_EMBEDDING_GAINS = {
    # They scale it up by 8.
    "gemma2": 0.4,
    "gemma3": 0.4,
    "gemma4": 0.4,
    "hybrid": 0.4,
    # Their blocks weigh little beside it.
    "gear": 0.3,
    "spark2_5": 0.3,
    "plamo3": 0.1,
    "longcat_flash": 0.1,
}

FAMILIES = tuple(_CONFIGS)
"""The families that most tests go through; `families.layered` has many more."""
RECURRENT = ("mamba", "hybrid")
"""Families with a recurrent state of a kind that verifies, and cannot draft."""
SLOTTED = tuple(name for name in FAMILIES if name not in RECURRENT)
"""Families whose layers hold keys and values, and nothing else."""
DRAFTERS = tuple(name for name in SLOTTED if name != "dynamic")
"""Families that can draft."""


def write_tiny_model(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    layers: int = 3,
    idle_layers: int = 0,
    noise: float = 0.0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model folder of a family and return it.

    Args:
        folder: made if it does not exist.
        family: one of `FAMILIES`.
        seed: other seeds are models that have nothing in common.
        layers: number of layers; the first ones do not depend on how many follow.
        idle_layers: layers behind them that take time and change nothing.
        noise: distance to the model without it; 0.01 agrees on nine tokens of ten, 0.05 on half.
        config: entries of `config.json` to add or replace.
    """
    full = _config(family, layers + idle_layers) | dict(config or {})
    module = _module(full)
    weights = _weights(family, module, seed, noise)
    for layer in range(layers, layers + idle_layers):
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            weights[f"model.layers.{layer}.{name}"] *= 0.0
    if full["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    if "quantization" in full:
        sanitize = getattr(module, "sanitize", dict)
        module.load_weights(list(sanitize(weights).items()))
        nn.quantize(module, **full["quantization"])
        weights = dict(tree_flatten(module.parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    _write_json(folder / "config.json", full)
    write_tokenizer(folder)
    return folder


def write_endless_model(folder: Path, family: str, **more: Any) -> Path:
    """The same, but its answers do not end by themselves: what is asked of it goes on.

    Args:
        folder: see `write_tiny_model`.
        family: see `write_tiny_model`.
        more: `seed`, `layers` and `noise` of `write_tiny_model`.
    """
    endless = {"eos_token_id": [], "max_position_embeddings": 200_000}
    write_tiny_model(folder, family, config=endless, **more)
    description = folder / "tokenizer_config.json"
    text = description.read_text(encoding="utf-8").replace('"eos_token"', '"no_eos_token"')
    description.write_text(text, encoding="utf-8")
    return folder


def write_adapter(folder: Path, model: Path, *, seed: int = 0) -> Path:
    """Write a LoRA adapter for a tiny model that changes what it says, and return its folder."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    module = _module(config)
    parameters = {"rank": 4, "scale": 8.0, "dropout": 0.0}
    linear_to_lora_layers(module, config["num_hidden_layers"], parameters)
    fresh: Any = tree_flatten(module.parameters())
    weights = {
        name: mx.array((0.2 * _normal(f"{seed}/{name}", array.shape)).astype(np.float32))
        for name, array in fresh
        if name.endswith(("lora_a", "lora_b"))
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    described = {
        "fine_tune_type": "lora",
        "num_layers": config["num_hidden_layers"],
        "lora_parameters": parameters,
    }
    _write_json(folder / "adapter_config.json", described)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer that all families share: byte-level BPE, chat template, stop token."""
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[BOS],
            "eos_token": SPECIAL_TOKENS[EOS],
            "chat_template": CHAT_TEMPLATE,
        },
    )


@cache
def tokenizer_json() -> str:
    """The text of `tokenizer.json`."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    text: str = tokenizer.to_str()
    return text


def vocabulary_size() -> int:
    """Tokens of the shared tokenizer."""
    tokenizer: Any = Tokenizer.from_str(tokenizer_json())
    size: int = tokenizer.get_vocab_size()
    return size


def _config(family: str, layers: int) -> dict[str, Any]:
    config = {
        **_COMMON,
        "vocab_size": vocabulary_size(),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "num_hidden_layers": layers,
        **(_CONFIGS | LAYERED | _JOINT)[family],
    }
    if "text_config" in config:
        config["text_config"] = config | config["text_config"]
    if family == "sliding":
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[layer % 2] for layer in range(layers)]
    if family == "mamba":
        del config["max_position_embeddings"]
    return config


def _module(config: dict[str, Any]) -> Any:
    model_class, args_class = _get_classes(config=config)
    mx.random.seed(0)  # some tensors begin with random numbers
    return model_class(args_class.from_dict(config))


def _weights(family: str, module: Any, seed: int, noise: float) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    parameters: Any = tree_flatten(module.parameters())
    for name, initial in parameters:
        tensor = _scaled(name, initial, _normal(f"{seed}/{name}", initial.shape))
        if noise:
            tensor += noise * tensor.std() * _normal(f"noise/{seed}/{name}", initial.shape)
        if "embed" in name:
            tensor *= _EMBEDDING_GAINS.get(family, 1.0)
        if "embed" in name or "lm_head" in name:
            tensor[: len(SPECIAL_TOKENS)] *= 0.1  # seldom generated, so that answers are long
            tensor[vocabulary_size() :] = 0.0  # padding
        weights[name] = mx.array(tensor.astype(np.float32))
    return weights


def _normal(key: str, shape: tuple[int, ...]) -> Floats:
    return np.random.default_rng(zlib.crc32(key.encode())).standard_normal(shape)


def _scaled(name: str, initial: mx.array, normal: Floats) -> Floats:
    """The weights of one tensor; `initial` is what its module starts with."""
    *_, layer, leaf = name.split(".")
    start: Floats = np.array(initial).astype(np.float64)
    if "norm" in layer:
        return start + _NORM_GAINS.get(layer, 0.0) + 0.1 * normal
    if leaf == "weight" and normal.ndim == 2 and "embed" not in layer:
        scaled: Floats = normal * (_GAINS.get(layer, 1.0) / normal.shape[-1] ** 0.5)
        return scaled
    if leaf in ("weight", "bias"):
        return 0.5 * normal
    return start + 0.3 * normal


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
