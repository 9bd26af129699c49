"""Configurations of tiny models whose layers hold more than keys and values.

One family per kind of state that mlx-lm has; `tiny_models` adds what all families share.
"""

from typing import Any

WINDOW = 8
"""Tokens that a sliding layer of a tiny model sees."""

_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_MLA: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

DELTA_NETS: dict[str, dict[str, Any]] = {
    # Three layers of a gated delta net to one of attention, and experts.
    "qwen3_next": {
        "model_type": "qwen3_next",
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 32,
        **_DELTA,
        **_EXPERTS,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "full_attention_interval": 2,
            "rope_parameters": {
                "type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
            **_DELTA,
        },
    },
    # A convolution for each of queries, keys and values.
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "tie_word_embeddings": False,
        **_DELTA,
    },
    # A gate per channel.
    "kimi_linear": {
        "model_type": "kimi_linear",
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
        },
        "model_max_length": 512,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 1,
        **_MLA,
        "q_lora_rank": None,
        **_EXPERTS,
    },
}

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "lfm2": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "num_dense_layers": 1,
        "use_expert_bias": True,
        "full_attn_idxs": [1],
        **_EXPERTS,
    },
}

MAMBAS: dict[str, dict[str, Any]] = {
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": 4,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": "M*-M",
        "num_hidden_layers": 4,
        "time_step_limit": [0.0, 100.0],
        "tie_word_embeddings": False,
    },
    "granite4": {
        "model_type": "granitemoehybrid",
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **_MAMBA,
    },
    # Attention and recurrence side by side in every layer.
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 64,
        "mamba_rms_norm": False,
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        **_MAMBA,
    },
    "plamo2": {
        "model_type": "plamo2",
        "hidden_size_per_head": 16,
        "attention_window_size": 512,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "num_hidden_layers": 3,
    },
}

FED_AGAIN: dict[str, dict[str, Any]] = {
    "jamba": {
        "model_type": "jamba",
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "rwkv7": {
        "model_type": "rwkv7",
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
        "tie_word_embeddings": False,
    },
    "bailing_linear": {
        "model_type": "bailing_moe_linear",
        "layer_group_size": 2,
        "group_norm_size": 1,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "use_qk_norm": True,
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "score_function": "sigmoid",
        "tie_word_embeddings": False,
        **_EXPERTS,
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
            "num_hidden_layers": 4,
        },
        "tie_word_embeddings": False,
    },
}

WINDOWED: dict[str, dict[str, Any]] = {
    # Attention sinks; windows of 128 in the real one.
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": _KINDS,
        "tie_word_embeddings": False,
    },
    "cohere2": {
        "model_type": "cohere2",
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "logit_scale": 1.0,
    },
    "exaone4": {
        "model_type": "exaone4",
        "rope_scaling": None,
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LGL",
    },
    "olmo3": {
        "model_type": "olmo3",
        "sliding_window": WINDOW,
        "layer_types": _KINDS,
        "tie_word_embeddings": False,
    },
    "ministral3": {
        "model_type": "ministral3",
        "sliding_window": WINDOW,
        "layer_types": _KINDS,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 512,
        },
    },
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash",
        "hybrid_layer_pattern": [1, 0, 1],
        "moe_layer_freq": [0, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "n_shared_experts": None,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 1,
        "topk_group": 1,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "v_head_dim": 16,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        **_EXPERTS,
    },
    "step3p5": {
        "model_type": "step3p5",
        "num_attention_groups": 2,
        "sliding_window": WINDOW,
        "layer_types": _KINDS,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2",
        "tie_word_embeddings": False,
    },
}

NESTED: dict[str, dict[str, Any]] = {
    # Keys and values in pairs of caches: of attention, and of the index over it.
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        **_MLA,
    },
}

RECURRENT_DRAFTERS = ("qwen3_5", "lfm2", "granite4", "mamba2")
"""Families with recurrent layers whose branches grow as a batch."""

LAYERED = DELTA_NETS | CONVOLUTIONS | MAMBAS | FED_AGAIN | WINDOWED | NESTED
"""Every family, by name."""
