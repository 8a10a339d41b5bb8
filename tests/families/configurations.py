"""Tiny configurations of the causal LMs of transformers, small enough that a training step takes about a second.

The rows of the oracle have about 30 to 120 tokens. Windows, chunks, and lengths at which a model switches to another
function are shorter than that, so that rows lie on both sides of each: at their real sizes (4,096 tokens and more) a
toy would never meet them. Dropout is off unless it is what an entry is about.

    build("mistral_window", vocabulary=320, pad_token_id=0, eos_token_id=1)

`MEANINGLESS` names the model types of transformers' mapping that have no entry, each with the reason. A test holds
that every type of the mapping is in one of the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# -------------------------------------------------------------------- what entries have in common

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
"""For most families; names that a configuration does not have are left out of it."""
_GPT_SIZES: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
# Some count positions from the padding's id on, which lies above 512 here.
_BERT_SIZES: dict[str, Any] = {
    **_SIZES,
    "max_position_embeddings": 2048,
    "is_decoder": True,
    "type_vocab_size": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_BART_SIZES: dict[str, Any] = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 2048,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "decoder_layerdrop": 0.0,
    "is_decoder": True,
    "is_encoder_decoder": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "decoder_sparse_step": 1,
}
"""The names of many families; each takes those that it has."""
_LINEAR_ATTENTION: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_LATENT_ATTENTION: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
# With few heads many scores are 0 exactly, and which of equal ones are among the top is not defined.
_INDEXER: dict[str, Any] = {"index_topk": 16, "index_head_dim": 8, "index_n_heads": 16}
_WINDOW_AND_FULL: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR_AND_FULL: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_SHARED_BY_ALL = {
    name
    for part in (_SIZES, _BERT_SIZES, _BART_SIZES, _EXPERTS, _LINEAR_ATTENTION, _LATENT_ATTENTION)
    for name in part
}


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


def _longrope(switch: int = 64, **options: Any) -> dict[str, Any]:
    """LongRoPE that takes other factors in rows of more than `switch` tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 6.0, 16.0]}
    return _rope("longrope", original_max_position_embeddings=switch, **factors, **options)


# -------------------------------------------------------------------- the entries

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # Learned, sinusoidal or relative positions, ALiBi.
    "gpt2": ("gpt2", _GPT_SIZES),
    "gpt_neo": (
        "gpt_neo",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 16,
            "max_position_embeddings": 512,
            "intermediate_size": 48,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "gpt_bigcode": ("gpt_bigcode", _GPT_SIZES),
    "openai_gpt": ("openai-gpt", _GPT_SIZES),
    "ctrl": (
        "ctrl",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "dff": 48,
            "n_positions": 512,
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        },
    ),
    "opt": (
        "opt",
        {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "word_embed_proj_dim": 32,
            "dropout": 0.0,
        },
    ),
    "biogpt": (
        "biogpt",
        {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0},
    ),
    "xglm": (
        "xglm",
        {
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 2048,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "layerdrop": 0.0,
        },
    ),
    "bloom": (
        "bloom",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "expansion_ratio": 2}),
    "falcon": ("falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}),
    "falcon_alibi": ("falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}),
    "codegen": ("codegen", {**_GPT_SIZES, "n_ctx": 512, "rotary_dim": 4}),
    "gptj": ("gptj", {**_GPT_SIZES, "rotary_dim": 4}),
    "gpt_neox": ("gpt_neox", {**_SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "gpt_neox_japanese": ("gpt_neox_japanese", {**_SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "cpmant": (
        "cpmant",
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "dim_head": 8,
            "dim_ff": 48,
            "num_hidden_layers": 2,
            "prompt_types": 4,
            "prompt_length": 4,
            "position_bias_num_buckets": 32,
            "position_bias_max_distance": 128,
            "segment_types": 4,
        },
    ),
    "xlnet": ("xlnet", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "dropout": 0.0}),
    "xlm": (
        "xlm",
        {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "causal": True, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "reformer": (
        "reformer",
        {
            "attn_layers": ["local", "local"],
            "hidden_size": 32,
            "attention_head_size": 8,
            "num_attention_heads": 4,
            "feed_forward_size": 48,
            "is_decoder": True,
            "axial_pos_embds": False,
            "local_attn_chunk_length": 16,
            "max_position_embeddings": 512,
            "hidden_dropout_prob": 0.0,
            "local_attention_probs_dropout_prob": 0.0,
        },
    ),
    # Encoders that decode with a causal mask.
    "bert": ("bert", _BERT_SIZES),
    "bert_generation": ("bert-generation", _BERT_SIZES),
    "big_bird": ("big_bird", {**_BERT_SIZES, "attention_type": "original_full"}),
    "camembert": ("camembert", _BERT_SIZES),
    "data2vec_text": ("data2vec-text", _BERT_SIZES),
    "electra": ("electra", {**_BERT_SIZES, "embedding_size": 32}),
    "ernie": ("ernie", _BERT_SIZES),
    "megatron_bert": ("megatron-bert", _BERT_SIZES),
    "rembert": (
        "rembert",
        {**_BERT_SIZES, "input_embedding_size": 32, "output_embedding_size": 32, "classifier_dropout_prob": 0.0},
    ),
    "roberta": ("roberta", _BERT_SIZES),
    "roberta_prelayernorm": ("roberta-prelayernorm", _BERT_SIZES),
    "roc_bert": (
        "roc_bert",
        {
            **_BERT_SIZES,
            "enable_pronunciation": False,
            "enable_shape": False,
            "pronunciation_vocab_size": 2048,
            "shape_vocab_size": 2048,
        },
    ),
    "roformer": ("roformer", {**_BERT_SIZES, "embedding_size": 32}),
    "xlm_roberta": ("xlm-roberta", _BERT_SIZES),
    "xlm_roberta_xl": ("xlm-roberta-xl", _BERT_SIZES),
    "xmod": (
        "xmod",
        {**_BERT_SIZES, "languages": ["en_XX"], "default_language": "en_XX", "adapter_reduction_factor": 2},
    ),
    # Decoders of encoder-decoders.
    "bart": ("bart", _BART_SIZES),
    "bigbird_pegasus": ("bigbird_pegasus", _BART_SIZES),
    "blenderbot": ("blenderbot", _BART_SIZES),
    "blenderbot_small": ("blenderbot-small", _BART_SIZES),
    "marian": ("marian", _BART_SIZES),
    "mbart": ("mbart", _BART_SIZES),
    "mvp": ("mvp", _BART_SIZES),
    "pegasus": ("pegasus", _BART_SIZES),
    "plbart": ("plbart", _BART_SIZES),
    "prophetnet": (
        "prophetnet",
        {
            "hidden_size": 32,
            "num_decoder_layers": 2,
            "num_decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 2048,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "is_decoder": True,
            "is_encoder_decoder": False,
        },
    ),
    "trocr": ("trocr", {**_BART_SIZES, "is_decoder": True}),
    # Rotations whose frequencies depend on a length.
    "llama_dynamic": ("llama", {**_SIZES, "max_position_embeddings": 64, **_rope("dynamic", factor=4.0)}),
    "llama_linear": ("llama", {**_SIZES, **_rope("linear", factor=4.0)}),
    "llama_yarn": ("llama", {**_SIZES, **_rope("yarn", factor=8.0, original_max_position_embeddings=64)}),
    "llama3": (
        "llama",
        {
            **_SIZES,
            **_rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "phi3_longrope": (
        "phi3",
        {
            **_SIZES,
            "original_max_position_embeddings": 64,
            **_longrope(partial_rotary_factor=1.0),
            "sliding_window": None,
        },
    ),
    "phi4_multimodal_longrope": (
        "phi4_multimodal",
        {
            **_SIZES,
            "original_max_position_embeddings": 64,
            **_longrope(partial_rotary_factor=1.0),
            "sliding_window": None,
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "crop_size": 28,
                "feature_layer": -1,
            },
            "audio_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_blocks": 1,
                "num_attention_heads": 2,
                "ext_pw_out_channel": 16,
                "depthwise_separable_out_channel": 16,
                "nemo_conv_channels": 16,
                "bias_max_distance": 8,
            },
        },
    ),
    "phimoe_longrope": (
        "phimoe",
        {
            **_SIZES,
            **_EXPERTS,
            "original_max_position_embeddings": 64,
            **_longrope(short_mscale=1.1, long_mscale=1.3),
            "router_jitter_noise": 0.0,
            "input_jitter_noise": 0.0,
        },
    ),
    "minicpm3_longrope": (
        "minicpm3",
        {
            **_SIZES,
            **_LATENT_ATTENTION,
            "scale_emb": 1,
            "dim_model_base": 32,
            "scale_depth": 1.0,
            "original_max_position_embeddings": 64,
            **_longrope(factor=8.0),
        },
    ),
    "hunyuan_alpha": ("hunyuan_v1_dense", {**_SIZES, **_rope("dynamic", alpha=100.0, factor=1.0)}),
    "hunyuan_moe": ("hunyuan_v1_moe", {**_SIZES, **_EXPERTS, "moe_topk": 2}),
    # Queries scaled by position, chunked attention.
    "llama4": (
        "llama4_text",
        {
            **_SIZES,
            **_EXPERTS,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 32,
            "no_rope_layer_interval": 2,
            "attn_temperature_tuning": True,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
        },
    ),
    "llama4_untuned": (
        "llama4_text",
        {
            **_SIZES,
            **_EXPERTS,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 32,
            "no_rope_layer_interval": 2,
            "attn_temperature_tuning": False,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
        },
    ),
    "ministral3": (
        "ministral3",
        {
            **_SIZES,
            **_rope(
                "yarn",
                factor=8.0,
                original_max_position_embeddings=32,
                llama_4_scaling_beta=0.5,
                mscale=1.0,
                mscale_all_dim=1.0,
                beta_fast=32.0,
                beta_slow=1.0,
            ),
        },
    ),
    "inkling": (
        "inkling_text",
        {
            **_SIZES,
            **_EXPERTS,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 16,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "d_rel": 8,
            "rel_extent": 64,
            "log_scaling_n_floor": 32,
            "log_scaling_alpha": 0.5,
            "logits_mup_width_multiplier": 1.0,
        },
    ),
    # Sliding windows.
    "mistral_window": ("mistral", {**_SIZES, "sliding_window": 16}),
    "ministral": ("ministral", {**_SIZES, **_WINDOW_AND_FULL}),
    "gemma2": (
        "gemma2",
        {
            **_SIZES,
            "sliding_window": 16,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": ("gemma3_text", {**_SIZES, **_WINDOW_AND_FULL, "query_pre_attn_scalar": 8}),
    "gemma3n": (
        "gemma3n_text",
        {
            **_SIZES,
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": "vocabulary",
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [48] * 4,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            **_SIZES,
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": "vocabulary",
            "global_head_dim": 16,
        },
    ),
    "gemma4_unified": ("gemma4_unified_text", {**_SIZES, **_WINDOW_AND_FULL, "global_head_dim": 16}),
    "gpt_oss": ("gpt_oss", {**_SIZES, **_EXPERTS, **_WINDOW_AND_FULL}),
    "olmo3": ("olmo3", {**_SIZES, **_WINDOW_AND_FULL}),
    "cohere2": ("cohere2", {**_SIZES, **_WINDOW_AND_FULL, "logit_scale": 0.3}),
    "cohere2_moe": ("cohere2_moe", {**_SIZES, **_EXPERTS, **_WINDOW_AND_FULL, "logit_scale": 0.3}),
    "cohere_compass": (
        "cohere_compass_text",
        {
            **_SIZES,
            **_WINDOW_AND_FULL,
            "logit_scale": 0.3,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
                "full_attention": None,
            },
        },
    ),
    "cwm": ("cwm", {**_SIZES, **_WINDOW_AND_FULL}),
    "exaone4": ("exaone4", {**_SIZES, **_WINDOW_AND_FULL}),
    "exaone_moe": ("exaone_moe", {**_SIZES, **_EXPERTS, **_WINDOW_AND_FULL}),
    "qwen2_window": ("qwen2", {**_SIZES, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "starcoder2": ("starcoder2", {**_SIZES, "sliding_window": 16, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "phi3_window": ("phi3", {**_SIZES, "sliding_window": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "smollm3": ("smollm3", {**_SIZES, "use_sliding_window": False, "no_rope_layer_interval": 2}),
    "mimo_v2_flash": ("mimo_v2_flash", {**_SIZES, **_EXPERTS, **_WINDOW_AND_FULL, "v_head_dim": 8}),
    "modernbert_decoder": ("modernbert-decoder", {**_SIZES, "local_attention": 16, "global_attn_every_n_layers": 2}),
    "vaultgemma": ("vaultgemma", {**_SIZES, **_WINDOW_AND_FULL, "query_pre_attn_scalar": 8}),
    "afmoe": ("afmoe", {**_SIZES, **_EXPERTS, **_WINDOW_AND_FULL, "num_dense_layers": 1}),
    "granite_swa": ("granite_swa", {**_SIZES, **_WINDOW_AND_FULL}),
    "granitemoe_swa": ("granitemoe_swa", {**_SIZES, **_EXPERTS, **_WINDOW_AND_FULL}),
    "laguna": ("laguna", {**_SIZES, **_EXPERTS, **_WINDOW_AND_FULL}),
    "mellum": ("mellum", {**_SIZES, **_EXPERTS, **_WINDOW_AND_FULL}),
    "dots1": ("dots1", {**_SIZES, **_EXPERTS, **_WINDOW_AND_FULL}),
    "doge": ("doge", {**_SIZES, "keep_window_size": 64}),
    "hrm_text": ("hrm_text", _SIZES),
    # Sparse attention by an indexer or by compression.
    "deepseek_v32": ("deepseek_v32", {**_SIZES, **_EXPERTS, **_LATENT_ATTENTION, **_INDEXER}),
    "glm_moe_dsa": ("glm_moe_dsa", {**_SIZES, **_EXPERTS, **_LATENT_ATTENTION, **_INDEXER}),
    "axk2": ("axk2", {**_SIZES, **_EXPERTS, **_LATENT_ATTENTION, **_INDEXER, "gated_norm_rank": 4}),
    "hy_v4": ("hy_v4", {**_SIZES, **_EXPERTS, **_LATENT_ATTENTION, **_INDEXER, "hc_mult": 2}),
    "deepseek_v4": (
        "deepseek_v4",
        {
            **_SIZES,
            **_EXPERTS,
            "num_key_value_heads": 1,
            "q_lora_rank": 16,
            "o_lora_rank": 8,
            "o_groups": 2,
            "hc_mult": 2,
            "sliding_window": 16,
            **_INDEXER,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "num_hidden_layers": 3,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        },
    ),
    "minimax_m3_vl": (
        "minimax_m3_vl_text",
        {
            **_SIZES,
            **_EXPERTS,
            "dense_intermediate_size": 48,
            "rotary_dim": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 8,
            "index_topk_blocks": 2,
        },
    ),
    "qwen4_exp": (
        "qwen4_exp_text",
        {
            **_SIZES,
            **_EXPERTS,
            **_LINEAR_ATTENTION,
            **_LINEAR_AND_FULL,
            "hc_count": 2,
            "hc_lowrank": 8,
            "ple_layer_ids": [1],
            "ple_embed_dim": 16,
            "ngram_size": 2,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 512,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
    ),
    # Recurrent state.
    "qwen3_next": ("qwen3_next", {**_SIZES, **_EXPERTS, **_LINEAR_ATTENTION, **_LINEAR_AND_FULL}),
    "qwen3_5": ("qwen3_5_text", {**_SIZES, **_LINEAR_ATTENTION, **_LINEAR_AND_FULL}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_SIZES, **_EXPERTS, **_LINEAR_ATTENTION, **_LINEAR_AND_FULL}),
    "kimi_linear": (
        "kimi_linear",
        {
            **_SIZES,
            **_EXPERTS,
            **_LATENT_ATTENTION,
            **_LINEAR_AND_FULL,
            "q_lora_rank": None,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "use_mambapy": False}),
    "mamba2": (
        "mamba2",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "falcon_mamba": ("falcon_mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            **_SIZES,
            "lru_width": 32,
            "num_hidden_layers": 3,
            "attention_window_size": 16,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    ),
    "jamba": (
        "jamba",
        {
            **_SIZES,
            **_EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": (
        "bamba",
        {
            **_SIZES,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "mamba_n_groups": 1,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_SIZES,
            **_EXPERTS,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "mamba_n_groups": 1,
        },
    ),
    "zamba": (
        "zamba",
        {
            **_SIZES,
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "n_mamba_heads": 2,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "use_mamba_kernels": False,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            **_SIZES,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "num_hidden_layers": 4,
            "hybrid_layer_ids": [1, 3],
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "use_mem_rope": True,
            "adapter_rank": 4,
            "num_mem_blocks": 1,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_SIZES,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "mamba_n_groups": 1,
            "lm_head_multiplier": 0.7,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_SIZES,
            **_EXPERTS,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "chunk_size": 16,
            "n_groups": 1,
        },
    ),
    "lfm2": ("lfm2", {**_SIZES, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
    "lfm2_moe": (
        "lfm2_moe",
        {**_SIZES, **_EXPERTS, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "num_dense_layers": 1},
    ),
    "minimax": ("minimax", {**_SIZES, **_EXPERTS, **_LINEAR_AND_FULL, "block_size": 16}),
    "olmo_hybrid": ("olmo_hybrid", {**_SIZES, **_LINEAR_ATTENTION, **_LINEAR_AND_FULL}),
    "rwkv": (
        "rwkv",
        {
            "hidden_size": 32,
            "attention_hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "context_length": 512,
        },
    ),
    "xlstm": ("xlstm", {"hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2, "chunk_size": 16}),
    "zaya": ("zaya", {**_SIZES, **_EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 8}),
    # Mixtures of experts.
    "mixtral": ("mixtral", {**_SIZES, **_EXPERTS}),
    "mixtral_router_logits": ("mixtral", {**_SIZES, **_EXPERTS, "output_router_logits": True}),
    "qwen3_moe": ("qwen3_moe", {**_SIZES, **_EXPERTS}),
    "qwen3_moe_router_logits": ("qwen3_moe", {**_SIZES, **_EXPERTS, "output_router_logits": True}),
    "qwen2_moe": ("qwen2_moe", {**_SIZES, **_EXPERTS}),
    "olmoe": ("olmoe", {**_SIZES, **_EXPERTS}),
    "flex_olmo": ("flex_olmo", {**_SIZES, **_EXPERTS}),
    "deepseek_v2": ("deepseek_v2", {**_SIZES, **_EXPERTS, **_LATENT_ATTENTION}),
    "deepseek_v3": ("deepseek_v3", {**_SIZES, **_EXPERTS, **_LATENT_ATTENTION}),
    "axk1": ("axk1", {**_SIZES, **_EXPERTS, **_LATENT_ATTENTION}),
    "youtu": ("youtu", {**_SIZES, **_LATENT_ATTENTION}),
    "glm4_moe": ("glm4_moe", {**_SIZES, **_EXPERTS}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_SIZES, **_EXPERTS, **_LATENT_ATTENTION}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            **_SIZES,
            **_EXPERTS,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    "hy_v3": ("hy_v3", {**_SIZES, **_EXPERTS}),
    "granitemoe": ("granitemoe", {**_SIZES, **_EXPERTS}),
    "granitemoeshared": ("granitemoeshared", {**_SIZES, **_EXPERTS}),
    "solar_open": ("solar_open", {**_SIZES, **_EXPERTS}),
    "minimax_m2": ("minimax_m2", {**_SIZES, **_EXPERTS}),
    "aria": ("aria_text", {**_SIZES, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "longcat_flash": (
        "longcat_flash",
        {
            **_SIZES,
            **_EXPERTS,
            **_LATENT_ATTENTION,
            "num_layers": 2,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        },
    ),
    "jetmoe": ("jetmoe", {**_SIZES, **_EXPERTS, "kv_channels": 8}),
    # Plain decoders, each with a head, a norm or a scale of its own.
    "qwen3": ("qwen3", _SIZES),
    "llama": ("llama", _SIZES),
    "gemma": ("gemma", _SIZES),
    "glm": ("glm", _SIZES),
    "glm4": ("glm4", _SIZES),
    "olmo": ("olmo", _SIZES),
    "olmo2": ("olmo2", _SIZES),
    "ernie4_5": ("ernie4_5", _SIZES),
    "seed_oss": ("seed_oss", {**_SIZES, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "granite": ("granite", {**_SIZES, "logits_scaling": 2.0}),
    "cohere": ("cohere", {**_SIZES, "logit_scale": 0.3}),
    "phi": ("phi", {**_SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "stablelm": ("stablelm", _SIZES),
    "persimmon": ("persimmon", _SIZES),
    "nemotron": ("nemotron", _SIZES),
    "diffllama": ("diffllama", _SIZES),
    "helium": ("helium", _SIZES),
    "apertus": ("apertus", _SIZES),
    "arcee": ("arcee", _SIZES),
    "bitnet": ("bitnet", _SIZES),
    "hyperclovax": ("hyperclovax", {**_SIZES, "logits_scaling": 0.5}),
    "nanochat": ("nanochat", _SIZES),
    "jais2": ("jais2", _SIZES),
}
"""Name -> the model type of transformers, and what differs from its defaults."""

MEANINGLESS: dict[str, str] = {
    "blt": "reads bytes in patches of its own, which a tokenizer's ids cannot stand for",
    "emu3": "images; its text model is a Llama",
    "fuyu": "images; its text model is Persimmon",
    "gemma3": "images; its text model is gemma3_text",
    "gemma3n": "images and sound; its text model is gemma3n_text",
    "gemma4": "images and sound; its text model is gemma4_text",
    "gemma4_assistant": "drafts for another model, whose states it needs",
    "gemma4_unified": "images and sound; its text model is gemma4_unified_text",
    "gemma4_unified_assistant": "drafts for another model, whose states it needs",
    "git": "captions of images; cannot sample without one",
    "got_ocr2": "images; its text model is Qwen2",
    "gpt-sw3": "a GPT-2 by another name",
    "llama4": "images; its text model is llama4_text",
    "mllama": "images; its text model is a Llama with cross-attention",
    "moshi": "sound; needs audio codes beside the text",
    "musicgen": "sound; samples audio codes",
    "musicgen_melody": "sound; samples audio codes",
    "qwen3_5": "images; its text model is qwen3_5_text",
    "qwen3_5_moe": "images; its text model is qwen3_5_moe_text",
    "qwen4_exp": "images; its text model is qwen4_exp_text",
    "whisper": "sound; decodes with an encoder's states",
}
"""Model type -> why it has no entry."""


# -------------------------------------------------------------------- building


def build(name: str, *, vocabulary: int, pad_token_id: int, eos_token_id: int, seed: int = 0) -> Any:
    """The model of an entry, in eval mode, with random weights that let every part of it matter.

    Matrices are normal with a deviation of .12, so that log-probs spread. Norm weights are about 1 and biases about 0,
    but not there: at exactly 1 and 0 some wrong orders of operations give right numbers. Decays and time steps of
    recurrent layers keep the values that transformers gives them.
    """
    model_type, options = FAMILIES[name]
    tokens = {"pad_token_id": pad_token_id, "eos_token_id": eos_token_id, "bos_token_id": pad_token_id}
    options = {key: vocabulary if value == "vocabulary" else value for key, value in options.items()}
    config = _config(model_type, {**tokens, **options, "vocab_size": vocabulary})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _fill(parameter_name, parameter, generator)
    return model.eval()


def _config(model_type: str, options: dict[str, Any]) -> Any:
    """The configuration; of the names that many entries share, those that its class has."""
    kind = CONFIG_MAPPING[model_type]
    known = {*kind.__dataclass_fields__, *kind.attribute_map}
    taken = {key: value for key, value in options.items() if key in known or key not in _SHARED_BY_ALL}
    return AutoConfig.for_model(model_type, **taken)


_RECURRENT = ("A_log", "dt_", "time_", "conv1d", "recurrent_param")


def _fill(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    noise = torch.randn(parameter.shape, generator=generator)
    if any(part in name for part in _RECURRENT):
        return
    if parameter.dim() >= 2:
        parameter.copy_(0.12 * noise)
    elif "norm" in name and name.endswith("weight"):
        parameter.add_(0.3 * noise)
    elif name.endswith("bias"):
        parameter.add_(0.1 * noise)


# -------------------------------------------------------------------- what is refused

_PACKED = ("packed", "shared")
_REFUSED: dict[str, str] = {
    "takes none of cache": "openai_gpt reformer rwkv xlnet",
    "fails in the transformers generator": "cpmant minimax prophetnet recurrent_gemma xlm xlstm",
    "scales queries behind column": "inkling llama4",
    # TRL multiplies hidden states with the head's weight, and these heads do more.
    "Cause: output layer": (
        "bert big_bird camembert data2vec_text electra ernie megatron_bert modernbert_decoder rembert roberta "
        "roberta_prelayernorm roc_bert roformer xlm_roberta xlm_roberta_xl xmod"
    ),
    # These count padding as positions, or as places of a compressed block, or do without a causal mask.
    "Cause: neighbours": (
        "bart bigbird_pegasus blenderbot blenderbot_small deepseek_v4 doge marian mbart mvp pegasus plbart trocr"
    ),
}
"""Part of the message -> families that are refused with it in the padded layouts."""
_REFUSED_WHEN_PACKED: dict[str, str] = {
    "an attention of its own": (
        "big_bird bloom codegen cpmant falcon falcon_alibi gpt_neo gpt_neox_japanese gptj megatron_bert mpt mvp "
        "openai_gpt prophetnet reformer rembert roformer rwkv trocr xglm xlm xlnet"
    ),
    "layers of the kinds": (
        "axk2 bamba deepseek_v32 deepseek_v4 falcon_h1 falcon_mamba glm_moe_dsa granitemoehybrid hy_v4 jamba "
        "kimi_linear lfm2 lfm2_moe llama4_untuned mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe "
        "qwen3_next qwen4_exp zamba zamba2 zaya"
    ),
    "attention implementation 'eager'": "bigbird_pegasus gpt_oss granite_swa granitemoe_swa mimo_v2_flash xlstm",
    "uses softcap": "gemma2 vaultgemma",
    "scales queries behind column": "inkling llama4",
    "fails on packed rows": "nemotron stablelm",
    "computes other hidden states": (
        "bart blenderbot blenderbot_small camembert data2vec_text doge marian mbart pegasus plbart recurrent_gemma "
        "roberta roberta_prelayernorm xlm_roberta xlm_roberta_xl xmod"
    ),
    "Cause: output layer": "bert electra ernie modernbert_decoder roc_bert",
}
"""The same in the packed layouts."""


def refusal(family: str, layout: str) -> str | None:
    """Part of the message with which the trainer refuses a family in a layout; None where it is exact."""
    for reason, families in (_REFUSED_WHEN_PACKED if layout in _PACKED else _REFUSED).items():
        if family in families.split():
            return reason
    return None
