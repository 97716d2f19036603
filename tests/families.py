"""A tiny random model of every family of base models that Echo names in docs/models.md.

Sizes are multiples of 32 where llama.cpp's q8_0 needs blocks of 32 values. Windows, chunks and convolutions are shorter
than the texts of tests, so that these layers have an effect. `FORMS` holds variants of these families that published
models have, such as biases, latent queries, or windows longer than a text. Weights are large enough that few tokens of
a distribution have most of the probability.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCABULARY: Final = 128
MAX_POSITIONS: Final = 256
_SMALL: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LINEAR: Final = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 4,
}


def _config(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}Config")(**{**_SMALL, **options})


FAMILIES: Final[Mapping[str, Callable[[], Any]]] = {
    "llama": _config("Llama", tie_word_embeddings=False, rope_parameters=_LLAMA3_ROPE),
    "qwen2": _config("Qwen2", tie_word_embeddings=True),
    "qwen3": _config("Qwen3", head_dim=32, tie_word_embeddings=True),
    "qwen3_moe": _config("Qwen3Moe", head_dim=32, norm_topk_prob=True, **_EXPERTS),
    "qwen3_next": _config("Qwen3Next", head_dim=32, shared_expert_intermediate_size=64, **_EXPERTS, **_LINEAR),
    "qwen3_5": _config("Qwen3_5Text", head_dim=32, **_LINEAR),
    "gemma2": _config(
        "Gemma2",
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": _config(
        "Gemma3Text",
        initializer_range=0.1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mistral": _config("Mistral", head_dim=32, sliding_window=None),
    "phi3": _config("Phi3", tie_word_embeddings=False, sliding_window=None),
    "smollm3": _config("SmolLM3", tie_word_embeddings=True, num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0]),
    "olmo2": _config("Olmo2"),
    "olmo3": _config("Olmo3", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "granite": _config(
        "Granite",
        embedding_multiplier=6.0,
        attention_multiplier=0.1,
        residual_multiplier=0.5,
        logits_scaling=2.0,
        tie_word_embeddings=True,
    ),
    "granitemoehybrid": _config(
        "GraniteMoeHybrid",
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
        embedding_multiplier=6.0,
        attention_multiplier=0.1,
        residual_multiplier=0.5,
        logits_scaling=2.0,
        layer_types=["mamba", "attention"],
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=8,
        position_embedding_type="nope",
    ),
    "gpt_oss": _config(
        "GptOss",
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=64,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek_v2": _config(
        "DeepseekV2",
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
    ),
    "lfm2": _config(
        "Lfm2",
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    ),
    "glm4": _config("Glm4", head_dim=32, partial_rotary_factor=0.5),
    "exaone4": _config(
        "Exaone4", sliding_window=None, layer_types=["full_attention"] * 2, rope_parameters=_LLAMA3_ROPE
    ),
    "cohere2": _config(
        "Cohere2", sliding_window=8, layer_types=["sliding_attention", "full_attention"], logit_scale=0.5
    ),
}

FORMS: Final[Mapping[str, Callable[[], Any]]] = {
    "llama_biased": _config("Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2_window": _config("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3_moe_window": _config("Qwen3Moe", head_dim=32, use_sliding_window=True, sliding_window=8, **_EXPERTS),
    "mistral_window": _config("Mistral", head_dim=32, sliding_window=8),
    "phi3_window": _config("Phi3", tie_word_embeddings=True, sliding_window=8, partial_rotary_factor=0.5),
    "gemma2_long_window": _config(
        "Gemma2", initializer_range=0.1, head_dim=32, query_pre_attn_scalar=32, sliding_window=MAX_POSITIONS
    ),
    "gemma3_capped": _config(
        "Gemma3Text", head_dim=32, query_pre_attn_scalar=32, sliding_window=8, final_logit_softcapping=2.0
    ),
    "granitemoehybrid_experts": _config(
        "GraniteMoeHybrid",
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        layer_types=["mamba", "attention"],
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=8,
        mamba_proj_bias=True,
        position_embedding_type="rope",
    ),
    "deepseek_v2_latent_queries": _config(
        "DeepseekV2",
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=2,
        moe_intermediate_size=64,
        first_k_dense_replace=0,
    ),
    "exaone4_window": _config(
        "Exaone4", head_dim=32, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "lfm2_biased": _config("Lfm2", layer_types=["conv", "full_attention"], conv_bias=True),
}
"""Variants of the families. The key is the family's name, followed by what differs."""


GGUF_FORMS: Final[Mapping[str, Callable[[], Any]]] = {
    "llama_wide_heads": _config("Llama", attention_bias=True, head_dim=32),
    "llama_yarn": _config("Llama", rope_parameters={**_YARN, "attention_factor": 1.3}),
    "qwen2_long_window": _config("Qwen2", use_sliding_window=True, sliding_window=160, max_window_layers=1),
    "qwen3_yarn": _config("Qwen3", head_dim=32, rope_parameters=_YARN),
    "gemma3_linear": _config(
        "Gemma3Text",
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3_longrope": _config(
        "Phi3",
        head_dim=16,
        max_position_embeddings=1024,
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        },
    ),
    "olmo3_yarn": _config(
        "Olmo3",
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "granitemoehybrid_groups": _config(
        "GraniteMoeHybrid",
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=64,
        shared_intermediate_size=32,
        layer_types=["mamba", "attention"],
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=2,
        mamba_chunk_size=8,
        position_embedding_type="rope",
        tie_word_embeddings=True,
    ),
    "granitemoehybrid_attention": _config(
        "GraniteMoeHybrid",
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
        attention_multiplier=0.2,
        layer_types=["attention", "attention"],
        position_embedding_type="rope",
    ),
    "gpt_oss_plain": _config(
        "GptOss",
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=64,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "deepseek_v2_full": _config(
        "DeepseekV2",
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        routed_scaling_factor=2.0,
        rope_parameters={**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "exaone4_deep": _config(
        "Exaone4", num_hidden_layers=64, hidden_size=32, num_attention_heads=2, intermediate_size=32, sliding_window=8
    ),
    "qwen3_5_equal_heads": _config("Qwen3_5Text", head_dim=32, **{**_LINEAR, "linear_num_value_heads": 2}),
}
"""Variants of the families that differ only in their conversion to llama.cpp."""


NAMES: Final[Mapping[str, str]] = {
    "llama": "Llama 3, SmolLM2",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5": "Qwen3.5",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)",
    "mistral": "Mistral",
    "phi3": "Phi-3, Phi-4",
    "smollm3": "SmolLM3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "granite": "Granite 3",
    "granitemoehybrid": "Granite 4",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "DeepSeek-V2",
    "lfm2": "LFM2",
    "glm4": "GLM-4",
    "exaone4": "EXAONE 4",
    "cohere2": "Command R7B",
}
"""Name of each family's models in the table of docs/models.md."""

FAILS: Final[Mapping[str, Mapping[str, str]]] = {
    "learner": {},
    "sampler": {},
    "verifier": {},
    "llama.cpp": {
        "deepseek_v2": "llama.cpp ignores adapters of latent attention's inputs: only o_proj can be trained.",
        "gpt_oss": "llama.cpp rounds the edges of YaRN's ramp, which gpt-oss defines without rounding.",
    },
    "MLX": {},
}
"""Why a family fails, in the words of the table in docs/models.md, by the table's column and by family. A family
without an entry works. Tests of the engines check these entries.
"""


def make_tiny(name: str, directory: Path, *, seed: int = 7) -> Path:
    """Write the random float32 model of this family or form to `directory`, in the files that such models are published
    in.
    """
    return make_of_config({**FAMILIES, **FORMS, **GGUF_FORMS}[name](), directory, seed=seed)


def make_of_config(config: Any, directory: Path, *, seed: int = 7) -> Path:
    """Write a random float32 model with this configuration to `directory`, like `make_tiny`."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        # An engine that ignores biases, norms or sinks would go unnoticed if biases were zero and norms one.
        if parameter.ndim < 2 and "A_log" not in parameter_name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory
