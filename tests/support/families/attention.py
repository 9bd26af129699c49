"""Configurations of tiny models with sliding layers, or several caches a layer."""

from typing import Any

from tests.support.families.parts import EXPERTS, GROUPS, LONGCAT, MLA, WINDOW

_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPE: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "default"}
_ROPES = {"sliding_attention": _ROPE, "full_attention": _ROPE}
_INDEXED: dict[str, Any] = {
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
    **MLA,
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
        **GROUPS,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "v_head_dim": 16,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        **EXPERTS,
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
    # Keys and values shared between layers, and several streams of activations.
    "gemma3n": {
        "model_type": "gemma3n",
        "text_config": {
            "model_type": "gemma3n_text",
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 288,
            "sliding_window": WINDOW,
            "rope_local_base_freq": 1000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": [*_KINDS, *_KINDS[:2]],
            "activation_sparsity_pattern": [0.0] * 5,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        },
    },
    "afmoe": {
        "model_type": "afmoe",
        "layer_types": _KINDS,
        "sliding_window": WINDOW,
        "num_dense_layers": 1,
        "num_shared_experts": 1,
        "tie_word_embeddings": False,
        **EXPERTS,
    },
    "exaone_moe": {
        "model_type": "exaone_moe",
        "layer_types": _KINDS,
        "sliding_window": WINDOW,
        "is_moe_layer": [False, True, True],
        "num_shared_experts": 1,
        "tie_word_embeddings": False,
        **EXPERTS,
    },
    # All layers run twice, with a cache for each time.
    "iquestloopcoder": {
        "model_type": "iquestloopcoder",
        "loop_num": 2,
        "loop_window_size": WINDOW,
        "tie_word_embeddings": False,
    },
    "laguna": {
        "model_type": "laguna",
        "layer_types": _KINDS,
        "sliding_window": WINDOW,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "shared_expert_intermediate_size": 32,
        "rope_parameters": _ROPES,
        "tie_word_embeddings": False,
        **EXPERTS,
    },
    "mellum": {
        "model_type": "mellum",
        "layer_types": _KINDS,
        "sliding_window": WINDOW,
        "rope_parameters": _ROPES,
        "tie_word_embeddings": False,
        **EXPERTS,
    },
    "muse_glimmer": {
        "model_type": "muse_glimmer",
        "layer_types": _KINDS,
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
    },
    # mlx-lm lets the tokens of a prompt see one token more than it lets those of an answer: here
    # the prompts of tests fit into the window.
    "plamo3": {"model_type": "plamo3", "window_size": 3 * WINDOW, "sliding_window_pattern": 2},
    "spark2_5": {
        "model_type": "spark2_5",
        "layer_types": _KINDS,
        "sliding_window": WINDOW,
        "rope_parameters": _ROPES,
    },
}

NESTED: dict[str, dict[str, Any]] = {
    # Keys and values in pairs of caches: of attention, and of the index over it.
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        **_INDEXED,
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "attention_bias": False,
        "rope_parameters": _ROPE,
        **GROUPS,
        **_INDEXED,
    },
    # Of the two attentions in every layer.
    "longcat_flash": {"model_type": "longcat_flash", **LONGCAT},
    "minimax_m3": {
        "model_type": "minimax_m3_vl",
        "text_config": {
            "model_type": "minimax_m3",
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "sparse", "sparse"],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 2,
        },
        "tie_word_embeddings": False,
    },
    # Chunks that attend to nothing before them.
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
