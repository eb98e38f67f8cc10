"""A tiny random model of each family that mlx-lm has, and what the engine is to make of it.

A family is one module of `mlx_lm.models`. Its configuration is the shared one below with what the
family needs besides: names that a family does not know are ignored by mlx-lm. Windows are short,
so that prompts of a test pass them; hybrids have at least one layer of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map

from workers.self_test import Batching

WINDOW = 24

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "sliding_window": WINDOW,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LATENT: dict[str, Any] = {  # multi-head latent attention
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_INDEXER: dict[str, Any] = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 16}
_MAMBA: dict[str, Any] = {"state_size": 8, "conv_kernel": 4, "use_conv_bias": True}
_DELTA: dict[str, Any] = {  # gated delta layers
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "num_hidden_layers": 4,
    "partial_rotary_factor": 0.5,
}
_KDA: dict[str, Any] = {  # kimi delta attention
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
_LONGCAT: dict[str, Any] = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
    "n_routed_experts": 4,
    "num_layers": 2,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "sliding_window_pattern": 2,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
    "num_key_value_heads": 1,
}
_GRANITE: dict[str, Any] = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
}
_MINICPM: dict[str, Any] = {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12}
_CONVOLUTION: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

_ONE_ROW, _ALONE = Batching.ONE_ROW_PREFILL, Batching.ALONE


@dataclass(frozen=True, slots=True)
class Family:
    """One module of mlx-lm's models.

    Attributes:
        name: what the tables call it.
        config: what its configuration has beside or instead of the shared one.
        batching: what `workers.self_test.choose_runner` picks for it.
        module: the module's name, where it is not the family's.
        text: whether the configuration is that of the text part of a model that has others.
        extractable: whether a row can be taken out and put back in.
        remark: what is worth knowing.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    batching: Batching = Batching.PACKED
    module: str = ""
    text: bool = False
    extractable: bool = True
    remark: str = ""

    @property
    def full_config(self) -> dict[str, Any]:
        """The configuration as a model's config.json would have it."""
        config = {"model_type": self.module or self.name, **_COMMON, **self.config}
        return {**config, "text_config": config} if self.text else config

    def build(self) -> Module:
        """Return a model with random weights, the same ones every time, evaluated."""
        module: Any = import_module(f"mlx_lm.models.{self.module or self.name}")
        mx.random.seed(0)
        model: Module = module.Model(module.ModelArgs.from_dict(self.full_config))
        # Zeros hide what a layer does: sinks, gates, biases, whole experts.
        weights: Any = model.parameters()  # type: ignore[no-untyped-call]
        model.update(tree_map(_without_zeros, weights))
        model.eval()
        mx.eval(model)
        return model


def _without_zeros(weights: mx.array) -> mx.array:
    is_float = mx.issubdtype(weights.dtype, mx.floating)
    if is_float and weights.size and not bool(mx.any(weights)):
        return (0.1 * mx.random.normal(weights.shape)).astype(weights.dtype)
    return weights


FAMILIES = (
    # Keys and values in every layer.
    Family("apertus", {"post_norm": False, "qk_norm": True}),
    Family("bailing_moe", _EXPERTS),
    Family("cohere"),
    Family(
        "dbrx",
        {
            "d_model": 64,
            "n_layers": 3,
            "n_heads": 4,
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        },
    ),
    Family("deepseek", _EXPERTS),
    Family("dots1", _EXPERTS),
    Family("ernie4_5"),
    Family(
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
        },
    ),
    Family("exaone", {"num_layers": 3}),
    Family("gemma"),
    Family(
        "gemma2",
        batching=_ALONE,
        remark="attends by itself, with soft caps; wrong in mlx-lm's batches",
    ),
    Family("glm"),
    Family("glm4", {"partial_rotary_factor": 0.5}),
    Family(
        "glm4_moe",
        {**_EXPERTS, "rope_scaling": None, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    ),
    Family("gpt2", {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512}),
    Family(
        "gpt_bigcode",
        {"n_embd": 64, "n_layer": 3, "n_inner": 96, "n_head": 4, "n_positions": 512},
        batching=_ALONE,
        remark="takes the position for one number",
    ),
    Family("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.5, "num_key_value_heads": 4}),
    Family("gptj", {"n_embd": 64, "n_positions": 512, "n_head": 4, "rotary_dim": 8, "n_layer": 3}),
    Family("granite", _GRANITE),
    Family("granitemoe", {**_EXPERTS, **_GRANITE}),
    Family("helium"),
    Family(
        "hunyuan",
        {
            **_EXPERTS,
            "moe_topk": 2,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
            "use_cla": True,
            "cla_share_factor": 2,
            "num_hidden_layers": 4,
            "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        },
    ),
    Family(
        "hunyuan_v1_dense", {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}}
    ),
    Family(
        "internlm2",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        batching=_ALONE,
        remark="takes the position for one number",
    ),
    Family(
        "internlm3",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
        batching=_ALONE,
        remark="takes the position for one number",
    ),
    Family("Klear", _EXPERTS),
    Family(
        "lille-130m", {"block_size": 512, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 3}
    ),
    Family("llama"),
    Family(
        "llama4_text",
        {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 0], "use_qk_norm": True},
    ),
    Family("mimo"),
    Family("minicpm", _MINICPM),
    Family("minimax", {**_EXPERTS, "shared_intermediate_size": 32, "rotary_dim": 8}),
    Family("mistral3", text=True),
    Family("mixtral", _EXPERTS),
    Family("nanbeige", {"num_loops": 2}),
    Family("nanochat"),
    Family("nemotron", {"hidden_act": "relu2"}),
    Family(
        "nemotron-nas",
        {
            "block_configs": [
                {
                    "attention": {
                        "no_op": False,
                        "replace_with_linear": False,
                        "n_heads_in_group": 2,
                    },
                    "ffn": {"no_op": False, "ffn_mult": 1.0},
                },
                {"attention": {"no_op": True}, "ffn": {"no_op": False, "ffn_mult": 1.0}},
                {"attention": {"no_op": False, "n_heads_in_group": 4}, "ffn": {"no_op": True}},
            ]
        },
    ),
    Family("olmo2"),
    Family("olmoe", _EXPERTS),
    Family(
        "openelm",
        {
            "num_transformer_layers": 3,
            "model_dim": 64,
            "ffn_dim_divisor": 8,
            "num_query_heads": [4, 4, 8],
            "num_kv_heads": [2, 2, 4],
            "ffn_multipliers": [1.0, 1.5, 2.0],
        },
    ),
    Family("phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    Family(
        "phi3",
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
            "original_max_position_embeddings": 64,
        },
    ),
    Family(
        "phimoe",
        {
            **_EXPERTS,
            "rope_scaling": {
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "short_mscale": 1.1,
                "long_mscale": 1.2,
            },
            "original_max_position_embeddings": 64,
        },
    ),
    Family(
        "phixtral",
        {"num_vocab": 128, "model_dim": 64, "num_heads": 4, "num_layers": 3, "rotary_dim": 8},
    ),
    Family("pixtral", text=True),
    Family("plamo", {"n_shared_head": 2}, batching=_ONE_ROW, remark="repeats the keys itself"),
    Family("qwen", {"kv_channels": 16}),
    Family("qwen2"),
    Family("qwen2_moe", _EXPERTS),
    Family("qwen2_vl", text=True),
    Family("qwen3"),
    Family("qwen3_moe", _EXPERTS),
    Family("qwen3_vl", text=True),
    Family("qwen3_vl_moe", _EXPERTS, text=True),
    Family("seed_oss"),
    Family("smollm3", {"no_rope_layer_interval": 2}),
    Family("solar_open", {**_EXPERTS, "partial_rotary_factor": 0.5}),
    Family(
        "stablelm",
        {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "qk_layernorm": True},
        batching=_ONE_ROW,
        remark="converts the keys itself",
    ),
    Family("starcoder2"),
    Family("talkie"),
    Family("telechat3"),
    # Windows in some layers.
    Family("afmoe", {**_EXPERTS, "layer_types": _SLIDING, "num_dense_layers": 1}),
    Family("cohere2", {"sliding_window_pattern": 2, "num_hidden_layers": 4}),
    Family(
        "exaone4", {"sliding_window_pattern": "LG", "num_hidden_layers": 4, "rope_scaling": None}
    ),
    Family(
        "exaone_moe", {**_EXPERTS, "layer_types": _SLIDING, "is_moe_layer": [False, True, True]}
    ),
    Family("gemma3", {"sliding_window_pattern": 2, "num_hidden_layers": 4}, text=True),
    Family("gemma3_text", {"sliding_window_pattern": 2, "num_hidden_layers": 4}),
    Family(
        "gemma3n",
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": [*_SLIDING, *_SLIDING],
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 16,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.5, 0, 0, 0, 0, 0],
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
            "intermediate_size": [96] * 6,
        },
        text=True,
        batching=_ONE_ROW,
        remark="layers reuse keys",
    ),
    Family("gemma4", _GEMMA4, text=True, batching=_ONE_ROW, remark="layers reuse keys"),
    Family("gemma4_text", _GEMMA4, batching=_ONE_ROW, remark="layers reuse keys"),
    Family("gpt_oss", {**_EXPERTS, "layer_types": _SLIDING}),
    Family(
        "iquestloopcoder",
        {"loop_window_size": 16},
        batching=_ONE_ROW,
        remark="attends twice a layer and mixes the two itself",
    ),
    Family(
        "laguna", {**_EXPERTS, "layer_types": _SLIDING, "num_attention_heads_per_layer": [4, 8, 4]}
    ),
    Family("llama-sliding", {"layer_types": _SLIDING}, module="llama"),
    Family(
        "mellum",
        {
            **_EXPERTS,
            "layer_types": _SLIDING,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
            },
        },
    ),
    Family(
        "mimo_v2_flash",
        {
            **_EXPERTS,
            "hybrid_layer_pattern": [1, 0, 1],
            "moe_layer_freq": [0, 1, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": 24,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 5000.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "v_head_dim": 8,
            "swa_head_dim": 16,
            "swa_v_head_dim": 8,
            "partial_rotary_factor": 0.5,
        },
    ),
    Family(
        "ministral3",
        {
            "layer_types": _SLIDING,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    Family("muse_glimmer", {"layer_types": _SLIDING}),
    Family("olmo3", {"layer_types": _SLIDING}),
    Family(
        "plamo3", {"sliding_window_pattern": 2}, remark="its window is one wider than its cache"
    ),
    Family(
        "spark2_5",
        {
            "layer_types": _SLIDING,
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 10000.0},
                "full_attention": {"rope_theta": 50000.0, "partial_rotary_factor": 0.5},
            },
        },
    ),
    Family(
        "step3p5",
        {
            "num_attention_groups": 2,
            "layer_types": _SLIDING,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 32,
            "moe_layers_enum": "1,2",
        },
    ),
    # Latent attention, and attention to keys that are picked.
    Family(
        "deepseek_v2",
        {
            **_EXPERTS,
            **_LATENT,
            "topk_method": "greedy",
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
    ),
    Family(
        "deepseek_v3", {**_EXPERTS, **_LATENT}, batching=_ONE_ROW, remark="changes the mask itself"
    ),
    Family(
        "deepseek_v32",
        {**_EXPERTS, **_LATENT, **_INDEXER},
        batching=_ONE_ROW,
        remark="picks the keys that it attends to",
    ),
    Family(
        "deepseek_v41",
        {
            **_EXPERTS,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "o_groups": 2,
            "o_lora_rank": 8,
            "head_dim": 32,
            "compress_ratios": (0, 4, 4),
            "kv_source_layer_ids": (1,),
            "index_source_layer_ids": (1,),
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_topk": 8,
            "candidate_source_layer_id": -1,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
        },
        batching=_ALONE,
        extractable=False,
        remark="mlx-lm can neither merge nor restore its caches",
    ),
    Family(
        "glm4_moe_lite",
        {**_EXPERTS, **_LATENT},
        batching=_ONE_ROW,
        remark="changes the mask itself",
    ),
    Family(
        "glm_moe_dsa",
        {
            **_EXPERTS,
            **_LATENT,
            **_INDEXER,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        batching=_ONE_ROW,
        remark="picks the keys that it attends to",
    ),
    Family(
        "kimi_k25",
        {**_EXPERTS, **_LATENT},
        text=True,
        batching=_ONE_ROW,
        remark="changes the mask itself",
    ),
    Family(
        "kimi_vl",
        {**_EXPERTS, **_LATENT},
        text=True,
        batching=_ONE_ROW,
        remark="changes the mask itself",
    ),
    Family("longcat_flash", {**_LATENT, **_LONGCAT}, batching=_ONE_ROW),
    Family(
        "longcat_flash_ngram",
        {**_LATENT, **_LONGCAT, "ngram_vocab_size_ratio": 2},
        batching=_ONE_ROW,
    ),
    Family(
        "minicpm3",
        {
            **_LATENT,
            "rope_scaling": {
                "type": "longrope",
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
            **_MINICPM,
        },
    ),
    Family(
        "minimax_m3_vl",
        {
            **_EXPERTS,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "moe_layer_freq": [0, 1, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 8,
                "sparse_topk_blocks": 3,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1, 1],
            },
        },
        text=True,
        batching=_ALONE,
        remark="wrong in mlx-lm's batches, beyond what the self-test can see",
    ),
    Family(
        "mistral4",
        {
            **_EXPERTS,
            **_LATENT,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 32,
                "rope_type": "default",
            },
        },
        batching=_ONE_ROW,
        remark="changes the mask itself",
    ),
    Family("youtu_llm", _LATENT),
    # A state in every layer.
    Family(
        "mamba",
        {**_MAMBA, "time_step_rank": 4, "intermediate_size": 128},
        batching=_ONE_ROW,
        remark="wrong in mlx-lm when prefilled together",
    ),
    Family(
        "mamba2",
        {
            **_MAMBA,
            "num_heads": 8,
            "n_groups": 1,
            "time_step_limit": (0.0, 100.0),
            "time_step_rank": "auto",
        },
        batching=_ONE_ROW,
    ),
    Family(
        "rwkv7",
        {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
        batching=_ONE_ROW,
    ),
    # A state in some layers.
    Family("baichuan_m1", {"sliding_window_layers": [1], "conv_window": 2}, batching=_ONE_ROW),
    Family(
        "bailing_hybrid",
        {
            **_EXPERTS,
            **_LATENT,
            "layer_group_size": 2,
            "group_norm_size": 2,
            "num_hidden_layers": 4,
        },
        batching=_ONE_ROW,
    ),
    Family(
        "bailing_moe_linear",
        {
            **_EXPERTS,
            "layer_group_size": 2,
            "group_norm_size": 2,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
        },
        batching=_ONE_ROW,
        remark="wrong in mlx-lm when prefilled together",
    ),
    Family(
        "bailing_moe_v3",
        {**_EXPERTS, **_LATENT, "layer_group_size": 2, "num_hidden_layers": 4},
        batching=_ONE_ROW,
    ),
    Family(
        "falcon_h1",
        {"mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_heads": 4},
        batching=_ONE_ROW,
    ),
    Family(
        "gear",
        {"layer_types": ["sliding_attention", "full_attention", "conv_mixer"], "conv_L_cache": 3},
        batching=_ONE_ROW,
    ),
    Family(
        "granitemoehybrid",
        {
            **_EXPERTS,
            **_GRANITE,
            "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_proj_bias": False,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
        },
        batching=_ONE_ROW,
    ),
    Family(
        "jamba",
        {
            **_EXPERTS,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_expand": 2,
        },
        batching=_ONE_ROW,
        remark="wrong in mlx-lm when prefilled together",
    ),
    Family(
        "kimi_k3",
        {
            **_EXPERTS,
            **_LATENT,
            "linear_attn_config": _KDA,
            "num_experts_per_token": 2,
            "attn_res_block_size": 2,
            "num_hidden_layers": 4,
        },
        text=True,
        batching=_ONE_ROW,
    ),
    Family(
        "kimi_linear",
        {
            **_EXPERTS,
            **_LATENT,
            "linear_attn_config": _KDA,
            "num_experts_per_token": 2,
            "model_max_length": 512,
            "num_hidden_layers": 4,
        },
        batching=_ONE_ROW,
    ),
    Family("lfm2", _CONVOLUTION, batching=_ONE_ROW),
    Family("lfm2-vl", {"model_type": "lfm2", **_CONVOLUTION}, text=True, batching=_ONE_ROW),
    Family(
        "lfm2_moe",
        {**_EXPERTS, **_CONVOLUTION, "use_expert_bias": True, "num_dense_layers": 1},
        batching=_ONE_ROW,
    ),
    Family(
        "nemotron_h",
        {
            **_EXPERTS,
            "hybrid_override_pattern": ["M", "*", "-", "M", "E"],
            "num_hidden_layers": 5,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 8,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_conv_bias": True,
            "time_step_limit": (0.0, 100.0),
            "moe_shared_expert_intermediate_size": 32,
        },
        batching=_ONE_ROW,
        remark="wrong in mlx-lm when prefilled together",
    ),
    Family(
        "olmo_hybrid",
        {
            **_DELTA,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_allow_neg_eigval": True,
            "linear_num_key_heads": 4,
        },
        batching=_ONE_ROW,
    ),
    Family(
        "plamo2",
        {"hidden_size_per_head": 16, "mamba_d_state": 8, "mamba_num_heads": 4, "mamba_step": 2},
        batching=_ONE_ROW,
    ),
    Family("qwen3_5", _DELTA, text=True, batching=_ONE_ROW),
    Family("qwen3_5_moe", {**_DELTA, **_EXPERTS}, text=True, batching=_ONE_ROW),
    Family("qwen3_next", {**_DELTA, **_EXPERTS}, batching=_ONE_ROW),
    Family(
        "recurrent_gemma",
        {
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": 24,
            "block_types": ["recurrent", "recurrent", "attention"],
            "num_key_value_heads": 1,
        },
        batching=_ONE_ROW,
    ),
    # Caches of their own kind.
    Family(
        "afm7",
        {
            "hidden_dim": 64,
            "num_layers": 4,
            "num_kv_reuse_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        batching=_ALONE,
        remark="layers reuse keys; wrong in mlx-lm's batches",
    ),
    Family(
        "llama4",
        {
            "attention_chunk_size": 32,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_hidden_layers": 4,
            "rope_scaling": None,
            "use_qk_norm": True,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
        text=True,
        batching=_ALONE,
        remark="mlx-lm cannot merge its caches",
    ),
)

# Modules of mlx-lm that are families too, and why there is no tiny model of them.
NOT_BUILT = {
    "bitnet": "needs a Metal kernel",
    "muse_spark": "needs a Metal kernel",
    "olmo": "needs the package ai2-olmo, and ends the process without it",
    "phi3small": "its forward pass in mlx-lm crashes MLX on the CPU (segmentation fault)",
    "prism_hadamard_qwen35": "made from packed 2-bit weights only",
}

# Modules of mlx-lm that are no family.
HELPERS = frozenset(
    {
        "activations",
        "base",
        "bitlinear_layers",
        "cache",
        "gated_delta",
        "mla",
        "pipeline",
        "rope_utils",
        "ssm",
        "switch_layers",
    }
)
