"""Families of GGUF models: what mlx-lm calls their tensors, and its config.json for them."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import ReaderTensor

from protocol.errors import ModelError
from services.gguf.file import GGUFFile, shape_of
from services.gguf.rope import rope_scaling

Config = dict[str, Any]

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {"ffn_up": "mlp.gate_up_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    key: f"block_sparse_moe.{name.removeprefix('mlp.')}"
    for key, name in _EXPERTS.items()
    if "shexp" not in key
}

_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that config.json says in other words."""


_PARTS = {"adapter": "an adapter", "mmproj": "the projector of another model"}
"""Types of files that are no models."""


class Family(NamedTuple):
    """How one architecture of GGUF becomes one of mlx-lm."""

    model_type: str
    architecture: str
    names: dict[str, str]
    complete: Callable[[GGUFFile, Config], None]
    """Adds to config.json what only this family has."""
    interleaved: bool = False
    """Whether llama.cpp orders the rows of q and k for RoPE over neighbouring pairs."""
    shifted_norms: bool = False
    """Whether the weights of norms are stored plus one."""


def family_of(file: GGUFFile) -> Family:
    """The family of a file; raises ModelError, which names it, if there is none here."""
    split = int(file.value("split.count", 1))
    if split > 1:
        raise ModelError(
            f"{str(file.path)!r} is one of {split} parts of a model; join them first, as "
            "`llama-gguf-split --merge` does"
        )
    kind = file.architecture
    part = _PARTS.get(str(file.value("general.type", "")), "")
    if file.value(f"{kind}.pooling_type", 0):
        part = "a model of embeddings"
    if part:
        raise ModelError(f"{str(file.path)!r} is {part}, which writes no text")
    if kind == "llama" and file.value("llama.expert_count", 0):
        kind = "mixtral"
    if kind not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelError(
            f"{str(file.path)!r} holds a model of the architecture {kind or 'unknown'!r}, which "
            f"cannot be converted; those that can: {known}"
        )
    return _FAMILIES[kind]


def name_of(tensor: ReaderTensor, family: Family) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; empty: not a weight."""
    if tensor.name in _TABLES:
        return ""
    found = re.fullmatch(r"(?:blk\.(\d{1,5})\.)?(\w+)\.(weight|bias)", tensor.name)
    if found is None or found[2] not in family.names:
        raise ModelError(
            f"the tensor {tensor.name[:100]!r} has no place in a model of the architecture "
            f"{family.model_type!r}"
        )
    layer, name, leaf = found.groups()
    prefix = f"model.layers.{layer}." if layer is not None else ""
    return f"{prefix}{family.names[name]}.{leaf}"


def heads_of(tensor: ReaderTensor, family: Family, config: Config) -> int:
    """Heads whose rows llama.cpp has reordered for RoPE; 0 if it has not."""
    if not family.interleaved:
        return 0
    part = tensor.name.split(".")[-2]
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    return int(config[heads[part]]) if part in heads else 0


def half_split(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of q or k in the order of RoPE over halves, from that over neighbouring pairs."""
    if heads == 0:
        return rows
    pairs = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def config_of(file: GGUFFile, family: Family) -> Config:
    """mlx-lm's config.json; raises ModelError if the metadata lacks something."""
    tensors = {tensor.name: tensor for tensor in file.tensors}
    for needed in ("token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight"):
        if needed not in tensors:
            raise ModelError(f"{str(file.path)!r} lacks the tensor {needed!r}")
    hidden, layers = _number(file, "embedding_length"), _number(file, "block_count")
    heads = _number(file, "attention.head_count")
    size = int(_of(file, "attention.key_length", 0)) or hidden // heads
    config: Config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _number(file, "attention.head_count_kv", heads),
        "head_dim": size,
        "intermediate_size": _number(file, "feed_forward_length"),
        "rms_norm_eps": float(
            file.require(f"{file.architecture}.attention.layer_norm_rms_epsilon")
        ),
        "rope_theta": float(_of(file, "rope.freq_base", 10000.0)),
        "max_position_embeddings": _number(file, "context_length"),
        "vocab_size": shape_of(tensors["token_embd.weight"])[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    _check_lengths(file, config)
    scaling = rope_scaling(file, tensors, config)
    if scaling:
        config["rope_scaling"] = scaling
    family.complete(file, config)
    return config


def _check_lengths(file: GGUFFile, config: Config) -> None:
    """Raise ModelError if a length in the metadata is not that of the tensors."""
    heads = config["num_attention_heads"] * config["head_dim"]
    lengths = {
        "token_embd.weight": ("embedding_length", config["hidden_size"]),
        "blk.0.attn_output.weight": ("attention.head_count", heads),
        "blk.0.ffn_down.weight": ("feed_forward_length", config["intermediate_size"]),
    }
    for tensor in file.tensors:
        name, length = lengths.get(tensor.name, ("", 0))
        if name and shape_of(tensor)[-1] != length:
            raise ModelError(
                f"{str(file.path)!r} is damaged: its {file.architecture}.{name} does not fit the "
                f"tensor {tensor.name!r}"
            )


def _of(file: GGUFFile, key: str, default: Any) -> Any:
    return file.value(f"{file.architecture}.{key}", default)


def _number(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A positive whole number; of a list, its one value."""
    name = f"{file.architecture}.{key}"
    value = file.require(name) if default is None else file.value(name, default)
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise ModelError(f"{name} in {str(file.path)!r} differs from layer to layer")
    number = values.pop()
    if not isinstance(number, int) or not 0 < number < 1 << 31:
        raise ModelError(f"{name} in {str(file.path)!r} is {str(number)[:60]!r}")
    return number


def _llama(file: GGUFFile, config: Config) -> None:
    names = {tensor.name for tensor in file.tensors}
    config["attention_bias"] = "blk.0.attn_q.bias" in names
    config["mlp_bias"] = "blk.0.ffn_up.bias" in names


def _mixtral(file: GGUFFile, config: Config) -> None:
    config["num_local_experts"] = _number(file, "expert_count")
    config["num_experts_per_tok"] = _number(file, "expert_used_count")


def _qwen(file: GGUFFile, config: Config) -> None:
    del file, config


def _qwen_moe(file: GGUFFile, config: Config) -> None:
    config["num_experts"] = _number(file, "expert_count")
    config["num_experts_per_tok"] = _number(file, "expert_used_count")
    config["moe_intermediate_size"] = _number(file, "expert_feed_forward_length")
    config["shared_expert_intermediate_size"] = int(
        _of(file, "expert_shared_feed_forward_length", 0)
    )
    config.update(decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True)


def _gemma2(file: GGUFFile, config: Config) -> None:
    _scale_queries(config, layers_of_largest=46)
    config["attn_logit_softcapping"] = float(_of(file, "attn_logit_softcapping", 50.0))
    config["final_logit_softcapping"] = float(_of(file, "final_logit_softcapping", 30.0))
    config["sliding_window"] = _number(file, "attention.sliding_window", 4096)
    # mlx-lm attends to everything in each layer of this family: right within the window only.
    most = min(config["max_position_embeddings"], config["sliding_window"])
    config["max_position_embeddings"] = most


def _gemma3(file: GGUFFile, config: Config) -> None:
    _scale_queries(config, layers_of_largest=62)
    window = int(_of(file, "attention.sliding_window", 0))
    config["sliding_window_pattern"] = int(_of(file, "attention.sliding_window_pattern", 6))
    if not window:
        config["sliding_window_pattern"] = 1
    config["sliding_window"] = window or config["max_position_embeddings"]
    config["rope_local_base_freq"] = float(_of(file, "rope.freq_base_swa", 10000.0))


def _scale_queries(config: Config, *, layers_of_largest: int) -> None:
    """The largest model of a family scales by another size than that of its heads."""
    largest = config["num_hidden_layers"] == layers_of_largest
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    )


def _phi3(file: GGUFFile, config: Config) -> None:
    size = config["head_dim"]
    config["partial_rotary_factor"] = int(_of(file, "rope.dimension_count", size)) / size
    original = int(_of(file, "rope.scaling.original_context_length", 0))
    if original:
        config["original_max_position_embeddings"] = original


_FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", _NAMES, _llama, interleaved=True),
    "mixtral": Family(
        "mixtral", "MixtralForCausalLM", _NAMES | _MIXTRAL, _mixtral, interleaved=True
    ),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", _NAMES, _qwen),
    "qwen2moe": Family("qwen2_moe", "Qwen2MoeForCausalLM", _NAMES | _EXPERTS, _qwen_moe),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _NAMES, _qwen),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", _NAMES | _EXPERTS, _qwen_moe),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", _NAMES | _GEMMA, _gemma2, shifted_norms=True),
    "gemma3": Family(
        "gemma3_text", "Gemma3ForCausalLM", _NAMES | _GEMMA, _gemma3, shifted_norms=True
    ),
    "phi3": Family("phi3", "Phi3ForCausalLM", _NAMES | _PHI3, _phi3),
}
