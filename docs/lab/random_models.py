"""Models of random weights and a realistic shape, built with mlx-lm's own classes.

`PYTHONPATH=. python docs/lab/random_models.py FOLDER --models NAME --tokenizer TARGET` writes
them, each with the tokenizer of a model that is here, for `ssd bench --model FOLDER/NAME
--draft-backend ngram --modes ar,ssd,mlx-lm`. What a model of random weights says hardly ever
repeats itself; those with a head of their own get one that mostly says tokens in loops
(`teach_loops`).
"""

# ruff: noqa: E402  # the BLAS must be loaded before MLX

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from services.kernels.cpu.library import load_blas

load_blas(threads=1)  # before anything imports MLX

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

_VOCABULARY = 49_152
"""As many tokens as the default target's tokenizer has."""
_LOOP = 12
"""Tokens of a loop that a taught model says again and again."""
_FOLLOWED = 0.97
"""Share of tokens after which it stays in its loop, at least."""

_SHARED: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 1 << 18,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}

MODELS: dict[str, dict[str, Any]] = {
    # Three gated delta nets to one attention layer, as Qwen 3.5 of 0.8B.
    "qwen3.5-like": {
        "model_type": "qwen3_5",
        "text_config": {
            **_SHARED,
            "model_type": "qwen3_5_text",
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_value_heads": 16,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "tie_word_embeddings": True,
        },
    },
    # The same of about a billion parameters, with a head of its own.
    "qwen3.5-1b-like": {
        "model_type": "qwen3_5",
        "text_config": {
            **_SHARED,
            "model_type": "qwen3_5_text",
            "hidden_size": 1536,
            "intermediate_size": 5120,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_value_heads": 16,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "tie_word_embeddings": False,
        },
    },
    # Short convolutions with an attention layer now and then, as LFM2 of 700M.
    "lfm2-like": {
        **_SHARED,
        "model_type": "lfm2",
        "hidden_size": 1536,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 1536,
        "block_ff_dim": 6912,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    # Windows of 512 and full layers five to one, as Gemma 3 of 1B.
    "gemma3-like": {
        **_SHARED,
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
}


def configure(name: str, layers: int) -> dict[str, Any]:
    """The model's config.json."""
    config = {**MODELS[name], "num_hidden_layers": layers}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "num_hidden_layers": layers}
    if name == "lfm2-like":
        config["full_attn_idxs"] = list(range(2, layers, 4))
    return config


def build(name: str, layers: int) -> Any:
    """The model with random weights: float32 on a CPU, else bfloat16."""
    mx.random.seed(1)
    config = configure(name, layers)
    model_class, arguments_class = _get_classes(config=config)
    model: Any = model_class(arguments_class.from_dict(config))
    model.set_dtype(mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16)
    mx.eval(model.parameters())
    return model


def teach_loops(model: Any) -> None:
    """Let a model with a head of its own mostly say the tokens of a loop, one after the other.

    The head finds the embedding of the token before; how much of it is left behind the layers
    is set by its scale, tried out until most of a loop is followed.
    """
    body = model.language_model
    embedding = body.model.embed_tokens
    table = embedding.weight
    tokens = mx.arange(_VOCABULARY)
    before = tokens - tokens % _LOOP + (tokens - 1) % _LOOP
    body.lm_head.weight = table[mx.minimum(before, _VOCABULARY - 1)]
    text = 600 * _LOOP + mx.arange(128)[None] % _LOOP
    for power in range(12):
        embedding.weight = table * 1.5**power
        said = mx.argmax(model(text)[0, :-1], axis=-1)
        if float(np.mean(np.array(said == text[0, 1:]))) >= _FOLLOWED:
            return
    raise RuntimeError("the model follows no loop")


def save(name: str, layers: int, folder: Path, tokenizer: Path) -> None:
    """The model as a folder that mlx-lm loads."""
    model = build(name, layers)
    if hasattr(getattr(model, "language_model", None), "lm_head"):
        teach_loops(model)
    folder.mkdir(parents=True)
    parameters: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(parameters), {"format": "mlx"})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)
    # The last token: what is in no prompt is hardly ever said.
    config = configure(name, layers) | {"bos_token_id": 1, "eos_token_id": _VOCABULARY - 1}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    """Write the models."""
    parser = argparse.ArgumentParser(description="Write models of random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokenizer", type=Path, required=True)
    given = parser.parse_args()
    mx.set_default_device(mx.cpu)
    for name in given.models:
        save(name, given.layers, given.folder / name, given.tokenizer)


if __name__ == "__main__":
    main()
