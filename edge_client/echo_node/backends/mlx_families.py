"""Table `FAMILIES` of the base models for which tests have shown that mlx-lm computes the same as transformers.

transformers' own configuration class reads config.json first, because it knows the older forms of that file and all
defaults. Then each of its settings must be one of three kinds, so that no setting is ignored silently:

- without effect on the logits (`_NO_EFFECT`), or decided in this module (`_TRANSLATED`)
- a size or a factor that mlx-lm's class reads
- a value that the family's row of the table lists as proven

Settings that only add or remove weights, such as biases, need no proof: loading fails if a weight is missing or left.
The rest of the module translates settings to the names that mlx-lm's classes read.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from echo_shared.delta.base_weights import unsupported_model
from echo_shared.errors import BackendError

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_ROPES: Final = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions for which mlx-lm's `initialize_rope` was shown to be right."""
_ROPE_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings", "truncate"}
    ),
}
_NO_EFFECT: Final = frozenset(
    {
        "attention_dropout",
        "bos_token_id",
        "embd_pdrop",
        "eos_token_id",
        # If mlx-lm's class computes head_dim instead of reading it, a wrong value leads to weights of the wrong shape.
        "head_dim",
        "initializer_range",
        "mamba_chunk_size",
        "mamba_expand",
        "max_position_embeddings",
        "model_type",
        "original_max_position_embeddings",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "qk_head_dim",
        "resid_pdrop",
        "router_aux_loss_coef",
        "use_cache",
    }
)
_TRANSLATED: Final = frozenset(
    {
        "_sliding_window_pattern",
        "layer_types",
        "max_window_layers",
        "rope_parameters",
        "sliding_window",
        "sliding_window_pattern",
        "use_sliding_window",
    }
)
_ANY: Final = (True, False)
_USUAL: Final[Mapping[str, tuple[object, ...]]] = {
    "attention_bias": _ANY,
    "conv_bias": _ANY,
    "hidden_act": ("silu",),
    "mamba_conv_bias": _ANY,
    "mamba_proj_bias": _ANY,
    "mlp_bias": _ANY,
    "mlp_only_layers": ([],),
    "tie_word_embeddings": _ANY,
}
"""Settings with the values for which mlx-lm computes every family like transformers. Settings with the value _ANY only
add or remove weights.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxFamily:
    """Settings of one model type for which mlx-lm's class was shown to compute the same as transformers."""

    module: str = ""
    """Name of mlx-lm's module; empty = the same as the model type."""
    ropes: tuple[str, ...] = ("default",)
    proven: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Further settings with the values for which mlx-lm's class is right. Sizes that the class reads are not listed."""
    default_rope: Mapping[str, Any] | None = None
    """Value of rope_scaling if positions are not scaled, for a class that requires the setting; None = not required."""
    layer_names: Mapping[str, str] = field(default_factory=dict)
    """Kinds of layers that mlx-lm names differently: transformers' name -> mlx-lm's name."""
    letters: bool = False
    """True if `sliding_window_pattern` is a text such as LLLG. False: it is a number n, and every n-th layer has full
    attention.
    """
    prefix: str = ""
    """Prefix of mlx-lm's names of layers: mlx-lm's name is this text and then transformers' name."""
    joined: Mapping[str, str] = field(default_factory=dict)
    """Layers of mlx-lm that are parts of one layer of transformers, in the order of its rows: end of mlx-lm's name ->
    end of transformers' name.
    """
    grouped_masks: bool = False
    """True if masks need one more dimension, because the class computes attention in groups of heads."""
    rounds_embedding_scale: bool = False
    """True if mlx-lm's class rounds the factor by which it multiplies embeddings to bfloat16, whatever the
    precision.
    """
    splits_experts: bool = False
    """True if the class expects the joined weight of gate and up of each expert as two transposed parts."""
    heads_fill_layer: bool = False
    """True if the class requires that the sizes of all heads add up to the size of the hidden state."""


_GELU: Final[Mapping[str, tuple[object, ...]]] = {"hidden_activation": ("gelu_pytorch_tanh",)}
FAMILIES: Final[Mapping[str, MlxFamily]] = {
    "llama": MlxFamily(ropes=_ROPES),
    "mistral": MlxFamily(module="llama", ropes=_ROPES),
    "qwen2": MlxFamily(ropes=_ROPES),
    "qwen3": MlxFamily(ropes=_ROPES),
    "qwen3_moe": MlxFamily(proven={"norm_topk_prob": _ANY}),
    "qwen3_next": MlxFamily(proven={"norm_topk_prob": _ANY}),
    "qwen3_5_text": MlxFamily(module="qwen3_5", prefix="language_model."),
    "gemma2": MlxFamily(proven={**_GELU, "use_bidirectional_attention": (None, False)}, grouped_masks=True),
    "gemma3_text": MlxFamily(
        ropes=("default", "linear"),
        proven={
            **_GELU,
            "use_bidirectional_attention": (None, False),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
        },
        rounds_embedding_scale=True,
    ),
    "phi3": MlxFamily(),
    "smollm3": MlxFamily(ropes=_ROPES),
    "olmo2": MlxFamily(ropes=_ROPES),
    "olmo3": MlxFamily(ropes=("default", "yarn")),
    "granite": MlxFamily(ropes=_ROPES),
    "granitemoehybrid": MlxFamily(
        proven={
            "num_local_experts": (0,),
            "num_experts_per_tok": (0,),
            "position_embedding_type": ("rope", "nope", None),
        },
        layer_names={"linear_attention": "mamba", _FULL: "attention"},
        joined={
            "mlp.gate_proj": "shared_mlp.input_linear",
            "mlp.up_proj": "shared_mlp.input_linear",
            "mlp.down_proj": "shared_mlp.output_linear",
        },
    ),
    "gpt_oss": MlxFamily(
        ropes=("yarn",), proven={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}, splits_experts=True
    ),
    "deepseek_v2": MlxFamily(
        ropes=("default", "yarn"),
        proven={
            "first_k_dense_replace": (0,),
            "n_group": (None,),
            "norm_topk_prob": (False,),
            "q_lora_rank": (None,),
            "topk_group": (None,),
            "topk_method": ("greedy", "group_limited_greedy"),
        },
        default_rope={"type": "yarn", "factor": 1.0},
    ),
    "lfm2": MlxFamily(proven={"block_auto_adjust_ff_dim": _ANY, "full_attn_idxs": (None,)}),
    "glm4": MlxFamily(),
    "exaone4": MlxFamily(ropes=_ROPES, letters=True),
    "cohere2": MlxFamily(heads_fill_layer=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxForm:
    """Architecture of a base model, with settings for which mlx-lm was shown to compute the same as transformers."""

    family: MlxFamily
    model_class: Any
    args: Any
    """Settings in the form that `model_class` takes."""
    vocab_size: int
    max_positions: int
    windows: tuple[int | None, ...]
    """For each layer, the number of tokens that it attends to; None: all tokens, or a layer without attention."""
    rope: Mapping[str, Any]
    """transformers' rope_parameters of the layers with full attention."""
    hidden_size: int
    heads_share_keys: bool


def read_form(base_dir: Path) -> MlxForm:
    """Read the model's architecture from config.json. Raises BackendError with the code unsupported_model for a family
    or a setting for which mlx-lm is not proven to be right.
    """
    model_type = json.loads((base_dir / "config.json").read_bytes()).get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise unsupported_model(f"mlx-lm is not proven to be right for models of the type {model_type}")
    values, other_names = _values(base_dir)
    module = importlib.import_module(f"mlx_lm.models.{family.module or model_type}")
    fields = frozenset(inspect.signature(getattr(module, "TextModelArgs", module.ModelArgs)).parameters)
    read = fields | {other_names[name] for name in fields & other_names.keys()}
    _check({name: value for name, value in values.items() if name not in other_names}, family, read)
    rope = _full_rope(values, family, fields)
    settings = {**values, **_rope_settings(values, rope, family), **_layer_settings(values, family, fields)}
    if settings.get("position_embedding_type", "rope") is None:
        settings["position_embedding_type"] = "nope"
    settings["block_dim"] = values["hidden_size"]
    heads, shared = values["num_attention_heads"], values.get("num_key_value_heads")
    return MlxForm(
        family=family,
        model_class=module.Model,
        args=module.ModelArgs.from_dict({name: value for name, value in settings.items() if name in fields}),
        vocab_size=int(values["vocab_size"]),
        max_positions=int(values["max_position_embeddings"]),
        windows=_windows(values),
        rope=rope,
        hidden_size=int(values["hidden_size"]),
        heads_share_keys=shared not in (None, heads),
    )


def _values(base_dir: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of the model's configuration class, and a map from its alias names of settings to their real
    names.

    transformers ignores other entries of config.json, so they are left out.
    """
    try:
        config = AutoConfig.from_pretrained(str(base_dir), trust_remote_code=False)
    except StrictDataclassError as error:
        raise unsupported_model(f"config.json: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise unsupported_model("weights that are quantized already")
    names = type(config)().to_dict().keys() - PretrainedConfig().to_dict().keys()
    values = {name: getattr(config, name) for name in names}
    other_names = {other: name for other, name in config.attribute_map.items() if name in values}
    values |= {other: values[name] for other, name in other_names.items()}
    # Always give head_dim: some models of transformers read it although their configuration class does not declare it.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {**values, "head_dim": head_dim, "model_type": config.model_type}, other_names


def not_proven(values: Mapping[str, Any], setting: str) -> BackendError:
    return unsupported_model(f"mlx-lm is not proven to be right for {values['model_type']} with {setting}")


def _check(values: Mapping[str, Any], family: MlxFamily, fields: frozenset[str]) -> None:
    """Raise BackendError for a setting with a value that was not proven."""
    for name in sorted(values.keys() - _NO_EFFECT - _TRANSLATED):
        value = values[name]
        if name in fields and _is_size(value):
            continue
        proven = family.proven.get(name, _USUAL.get(name, ()))
        if not any(type(value) is type(one) and value == one for one in proven):
            raise not_proven(values, f"{name} = {value!r}")
    if family.heads_fill_layer and values["head_dim"] * values["num_attention_heads"] != values["hidden_size"]:
        raise not_proven(values, f"head_dim = {values['head_dim']}, which is not hidden_size / num_attention_heads")


def _is_size(value: object) -> bool:
    """Return True for a positive number, and for a list of numbers that is not empty."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(one, int | float) for one in value)
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _full_rope(values: Mapping[str, Any], family: MlxFamily, fields: frozenset[str]) -> dict[str, Any]:
    """Return the rotary positions of the layers with full attention. Raise BackendError if they are not proven."""
    if values.get("position_embedding_type", "rope") != "rope":
        return {"rope_type": "default", "rope_theta": 10_000.0}
    given = values["rope_parameters"]
    full = {name: value for name, value in given.get(_FULL, given).items() if value is not None}
    kind, theta = full["rope_type"], full["rope_theta"]
    if kind not in family.ropes:
        raise not_proven(values, f"rope_type = {kind!r}")
    if (sliding := given.get(_SLIDING)) is not None and (
        sliding["rope_type"] != "default"
        or ("rope_local_base_freq" not in fields and sliding["rope_theta"] != theta)
        or sliding.get("partial_rotary_factor") not in (None, 1.0)
    ):
        raise not_proven(values, f"rope_parameters of sliding layers = {sliding!r}")
    if full.get("partial_rotary_factor", 1.0) != 1.0 and "partial_rotary_factor" not in fields:
        raise not_proven(values, f"partial_rotary_factor = {full['partial_rotary_factor']}")
    unknown = full.keys() - _ROPE_KEYS[kind] - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind == "yarn":
        # transformers ignores mscale without mscale_all_dim, and the reverse. Accept an attention_factor that equals
        # the default, because published models state it.
        follows = 1.0 + 0.1 * math.log(max(1.0, full["factor"]))
        if "mscale" not in full and math.isclose(full.get("attention_factor", 0.0), follows, rel_tol=1e-6):
            unknown -= {"attention_factor"}
        if ("mscale" in full) != ("mscale_all_dim" in full):
            unknown |= {"mscale"}
    if unknown:
        raise not_proven(values, f"{', '.join(sorted(unknown))} in rope_parameters")
    return full


def _rope_settings(values: Mapping[str, Any], rope: Mapping[str, Any], family: MlxFamily) -> dict[str, Any]:
    kind = rope["rope_type"]
    # Classes differ in whether they read `type` or `rope_type`, and have other defaults than transformers.
    scaling = {"original_max_position_embeddings": values["max_position_embeddings"], **rope, "type": kind}
    sliding = (values.get("rope_parameters") or {}).get(_SLIDING, rope)
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": family.default_rope if kind == "default" else scaling,
        "rope_parameters": {**rope, "type": kind},
        "rope_local_base_freq": sliding["rope_theta"],
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
    }


def _layer_settings(values: Mapping[str, Any], family: MlxFamily, fields: frozenset[str]) -> dict[str, Any]:
    kinds: Sequence[str] | None = values.get("layer_types")
    if kinds is None:
        return {}
    settings: dict[str, Any] = {"layer_types": [family.layer_names.get(kind, kind) for kind in kinds]}
    if family.letters:
        slides = _SLIDING in kinds
        letters = "".join("L" if kind == _SLIDING else "G" for kind in kinds)
        settings["sliding_window_pattern"] = letters if slides else None
    elif "sliding_window_pattern" in fields:
        settings["sliding_window_pattern"] = _interval(values, kinds)
    elif "full_attention_interval" in fields:
        settings["full_attention_interval"] = _interval(values, kinds)
    return settings


def _interval(values: Mapping[str, Any], kinds: Sequence[str]) -> int:
    """Return n if layers n, 2n, 3n ... have full attention, and only these."""
    interval = kinds.index(_FULL) + 1 if _FULL in kinds else 0
    if not interval or any((kind == _FULL) != (place % interval == 0) for place, kind in enumerate(kinds, start=1)):
        raise not_proven(values, f"layer_types = {list(kinds)}")
    return interval


def _windows(values: Mapping[str, Any]) -> tuple[int | None, ...]:
    window: int | None = values.get("sliding_window")
    kinds: Sequence[str] | None = values.get("layer_types")
    if kinds is None:
        return (window,) * int(values["num_hidden_layers"])
    strange = set(kinds) - {_FULL, _SLIDING, "linear_attention", "conv"}
    if strange:
        raise not_proven(values, f"layers of the kind {', '.join(sorted(strange))}")
    return tuple(window if kind == _SLIDING else None for kind in kinds)
