"""If llama.cpp and transformers compute a model differently, it is refused with a sentence that names the
difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo_shared.errors import BackendError
from echo_shared.gguf.families import FAMILIES
from echo_shared.gguf.shape import ModelShape, read_shape
from tests import families

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_LLAMA3 = {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_FULL = ["full_attention", "full_attention"]
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "gpt2"}, "model_type gpt2"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    ("llama", {"rope_parameters": {**_PLAIN, "rope_type": "dynamic"}}, "rope_type dynamic"),
    ("llama", {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5}}, "rotary embeddings of 8 of 16 values"),
    ("qwen3", {"rope_parameters": _LLAMA3}, "rope_type llama3"),
    ("qwen3", {"rope_parameters": {**_YARN, "beta_fast": 16.0}}, "beta_fast 16.0"),
    ("qwen3", {"rope_parameters": {**_YARN, "truncate": False}}, "YaRN with truncate: false"),
    ("qwen2", {"head_dim": 32}, "4 heads of 32 values, and a hidden state of 64"),
    ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob: false"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "layers without experts"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "layers without experts"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "no_rope_layers other than every fourth"),
    (
        "phi3",
        {"original_max_position_embeddings": 100, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "longrope after 100 positions",
    ),
    ("gemma2", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar 64 instead of 32"),
    ("gemma2", {"use_bidirectional_attention": True}, "bidirectional attention"),
    ("gemma2", {"attn_logit_softcapping": None}, "not capped"),
    ("gemma2", {"final_logit_softcapping": None}, "not capped"),
    ("gemma2", {"layer_types": _FULL}, "no layer with a sliding window"),
    ("gemma3", {"attn_logit_softcapping": 5.0}, "capped attention"),
    (
        "gemma3",
        {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": {**_PLAIN, "rope_type": "linear"}}},
        "rope_type linear in sliding layers",
    ),
    ("gemma3", {"rope_parameters": {"full_attention": _YARN, "sliding_attention": _PLAIN}}, "rope_type yarn"),
    (
        "olmo3",
        {"rope_parameters": {"full_attention": _YARN, "sliding_attention": {**_YARN, "rope_type": "linear"}}},
        "rope_type linear in sliding layers",
    ),
    ("olmo3", {"rope_parameters": {"full_attention": _YARN, "sliding_attention": _YARN}}, "rope_type yarn in sliding"),
    (
        "olmo3",
        {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": {**_PLAIN, "rope_theta": 5.0}}},
        "another rope_theta in sliding layers",
    ),
    ("cohere2", {"layer_types": _FULL}, "no layer with a sliding window"),
    (
        "cohere2",
        {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _YARN}},
        "other rotary embeddings in sliding layers",
    ),
    ("exaone4_window", {"head_dim": 16}, "sliding windows in a model of 2 layers, not 64"),
    ("exaone4_window", {"head_dim": 16, "layer_types": _FULL}, "no layer with a sliding window"),
    ("gpt_oss_plain", {"swiglu_limit": 5.0}, "another activation"),
    ("gpt_oss_plain", {"layer_types": _FULL}, "no layer with a sliding window"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method group_limited_greedy"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "layers without experts between"),
    ("deepseek_v2", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05"),
    ("deepseek_v2", {"q_lora_rank": 8, "num_hidden_layers": 27}, "q_lora_rank in a model of 27 layers"),
    ("deepseek_v2", {"rope_parameters": _YARN}, "YaRN without equal mscale and mscale_all_dim"),
    ("qwen3_next", {"linear_value_head_dim": 64}, "linear_value_head_dim other than"),
    ("qwen3_next", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 instead of 1e-6"),
    ("qwen3_next", {"linear_num_value_heads": 3}, "3 value heads for 2 key heads"),
    ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob: false"),
    ("qwen3_next", {"mlp_only_layers": [1]}, "layers without experts"),
    ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "no layer with attention"),
    (
        "qwen3_5",
        {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1]}},
        "mrope_section [1, 1, 1] for 8 rotated values",
    ),
    ("lfm2", {"conv_bias": True}, "conv_bias"),
    ("granitemoehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias"),
    ("granitemoehybrid_experts", {"layer_types": _FULL}, "experts, but no Mamba layer"),
    ("granitemoehybrid", {"mamba_expand": 1}, "mamba_expand 1 instead of 2"),
    ("granitemoehybrid", {"time_step_limit": [0.001, 0.1]}, "time_step_limit 0.001 to 0.1"),
]


def shape_of(directory: Path, name: str, changes: dict[str, Any]) -> ModelShape:
    """Return the shape of a model of this family (or variant of a family) after these changes of its configuration."""
    config = {**families.FAMILIES, **families.FORMS, **families.GGUF_FORMS}[name]().to_dict()
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return read_shape(directory)


@pytest.mark.parametrize(("name", "changes", "sentence"), CASES)
def test_what_llama_cpp_computes_otherwise_is_refused(
    name: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(BackendError) as caught:
        shape_of(tmp_path, name, changes)
    assert caught.value.code == "unsupported_model"
    assert sentence in str(caught.value)


def test_each_family_has_a_tiny_model() -> None:
    assert {make().model_type for make in families.FAMILIES.values()} == FAMILIES.keys()


@pytest.mark.parametrize(
    ("name", "limit"), [("mistral_window", 8), ("qwen2_long_window", 160), ("phi3_longrope", 256), ("gemma3", 256)]
)
def test_the_model_is_exact_up_to_a_length(name: str, limit: int, tmp_path: Path) -> None:
    assert shape_of(tmp_path, name, {}).max_positions == limit


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen3", {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": None}),
        ("gemma2", {"layer_types": None}),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 2}),
        ("gemma3", {"rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        (
            "gemma3",
            {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
        ("olmo3", {"rope_parameters": None, "rope_scaling": {**_YARN, "rope_theta": 5e5, "attention_factor": 1.2}}),
        ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.5}),
        ("qwen3_next", {"layer_types": None, "full_attention_interval": 4}),
        ("qwen3_next", {"rope_parameters": None, "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        ("olmo3", {"rope_parameters": None, "rope_theta": 5e5}),
        ("cohere2", {"layer_types": None, "sliding_window_pattern": 2}),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [1]}),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}),
        ("gpt_oss_plain", {"layer_types": None}),
        ("mistral", {"head_dim": None, "hidden_size": 128}),
        (
            "phi3_longrope",
            {
                "rope_parameters": None,
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 256,
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
                },
            },
        ),
    ],
)
def test_configurations_from_before_transformers_5(name: str, published: dict[str, Any], tmp_path: Path) -> None:
    """Older configurations use other names for some values, or rely on transformers' defaults."""
    config = {**families.FAMILIES, **families.FORMS, **families.GGUF_FORMS}[name]()
    read = type(config)(**{**config.to_dict(), **published}).to_dict()
    old, new = shape_of(tmp_path, name, published).family, shape_of(tmp_path, name, read).family
    facts = ("layer_types", "head_dim", "num_experts", "max_positions", "window", "intermediate_size")
    assert [getattr(old, fact) for fact in facts] == [getattr(new, fact) for fact in facts]
    for ours, theirs in ((old.rope, new.rope), (old.sliding_rope, new.sliding_rope)):
        assert (ours.theta, ours.kind, ours.dims, ours.factor) == (
            theirs.theta,
            theirs.kind,
            theirs.dims,
            theirs.factor,
        )
        assert ours.original_positions == theirs.original_positions
        assert ours.attention_factor(256) == theirs.attention_factor(256)
