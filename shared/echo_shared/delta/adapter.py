"""LoRA adapters in PEFT's directory layout, read with numpy only, for any engine.

The scaling (alpha/r, rsLoRA, rank and alpha patterns) is folded into B, so engines only add B·A·x. An adapter must be
plain LoRA on the layers that mix tokens (attention and its relatives) and on feed-forward layers, without biases, extra
modules or changes to the base. Experts and routers of a mixture of experts never have an adapter; shared experts may.
Adapters come from the network: anything else raises CodecError. An engine also refuses layers that its base lacks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_shared.delta.tensors import TensorFile
from echo_shared.errors import CodecError

WEIGHTS_FILE: Final = "adapter_model.safetensors"
CONFIG_FILE: Final = "adapter_config.json"
ATTENTION: Final = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj"),  # attention of most families; LFM2's output is out_proj
        "qkv_proj",  # fused attention: Phi-3
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),  # latent attention: DeepSeek-V2
        *("in_proj_qkvz", "in_proj_ba"),  # linear attention: Qwen3-Next
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),  # linear attention: Qwen3.5
        *("in_proj", "out_proj"),  # Mamba: Granite 4; convolution: LFM2; out_proj also of linear attention
    }
)
"""Names (the last part of a layer's path) of the linear layers that belong to operations that mix tokens: attention,
linear attention, Mamba, convolution.
"""
FEED_FORWARD: Final = frozenset(
    {
        *("gate_proj", "up_proj", "down_proj"),  # gated MLP of most families, and shared experts
        "gate_up_proj",  # fused: Phi-3, GLM-4
        *("w1", "w2", "w3"),  # LFM2
        *("input_linear", "output_linear"),  # the shared MLP of Granite 4
    }
)
"""Names of the linear layers of feed-forward blocks."""
ON_REQUEST: Final = frozenset({"kv_b_proj"})
"""Layers that have an adapter only if a run names them. llama.cpp merges kv_b_proj, the second half of latent
attention's key and value projection, into other products."""
PROJECTIONS: Final = ATTENTION | FEED_FORWARD | ON_REQUEST
"""Names of all linear layers that an adapter may change."""
_EXPERTS: Final = frozenset({"experts", "block_sparse_moe"})
"""Parts of a path that lead to experts and routers. Shared experts have other names."""
MAX_RANK: Final = 1_024

_TENSOR_NAME: Final = re.compile(
    rf"base_model\.model\.((?:[A-Za-z0-9_]+\.)+(?:{'|'.join(sorted(PROJECTIONS))}))"
    r"\.lora_([AB])(?:\.([A-Za-z0-9_-]+))?\.weight"
)
"""Groups of the match: layer, half (A or B), adapter name. PEFT omits the adapter name when it saves; a state dict
saved by other means contains `.default`.
"""
_OTHERWISE_NAMED: Final = re.compile(rf"(?:.*\.)?(?:{'|'.join(sorted(PROJECTIONS))})\..*lora_[AB].*", re.IGNORECASE)
_READ_KEYS: Final = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"})
_HARMLESS_KEYS: Final = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "task_type",
    }
)
"""Keys of PEFT's configuration that do not affect the adapter's output. Any other key must be unset."""

_BASE_KEEPING_INITS: Final = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that keep the base weights. PEFT's other initializations change the base weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """The low-rank update of one linear layer: weight += b @ a."""

    path: str
    """Layer name in the base model, such as model.layers.0.self_attn.q_proj."""
    a: NDArray[np.float32]
    """Matrix A, shape [rank, inputs]."""
    b: NDArray[np.float32]
    """Matrix B, shape [outputs, rank], already multiplied by the adapter's scaling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """All layer updates of one policy version, ordered by path."""

    modules: tuple[LoraModule, ...]

    @property
    def max_rank(self) -> int:
        return max(len(module.a) for module in self.modules)


def is_adaptable(path: str) -> bool:
    """Return True if an adapter may change the linear layer at `path`, such as model.layers.0.self_attn.q_proj."""
    return path.rpartition(".")[2] in PROJECTIONS and not is_of_experts(path)


def is_of_experts(path: str) -> bool:
    """Return True if the layer or tensor at `path` belongs to an expert or router of a mixture of experts."""
    return not _EXPERTS.isdisjoint(path.split("."))


def lora_scaling(rank: int, alpha: float, *, rslora: bool) -> float:
    """Return the factor of B·A: alpha / r (LoRA, arXiv 2106.09685, section 4.1) or alpha / √r (rsLoRA, arXiv
    2312.03732).
    """
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def load_adapter(directory: Path) -> Adapter:
    """Read the adapter in `directory`. Raises CodecError if it is damaged, has values that are not finite, or is not
    plain LoRA.
    """
    config = _read_config(directory / CONFIG_FILE)
    halves: dict[str, dict[str, NDArray[np.float32]]] = {}
    named: set[str] = set()
    try:
        tensors = TensorFile(directory / WEIGHTS_FILE)
    except OSError as error:
        raise CodecError("An adapter has no readable weights.", got=f"{WEIGHTS_FILE}: {error.strerror}") from error
    for name in sorted(tensors):
        match = _TENSOR_NAME.fullmatch(name)
        if is_of_experts(name):
            raise CodecError(
                "An adapter changes an expert or a router of a mixture of experts.",
                got=name,
                do="Train LoRA on attention and shared experts only.",
            )
        if match is None and _OTHERWISE_NAMED.fullmatch(name):
            raise CodecError(
                "An adapter's tensor names are not those of PEFT.",
                got=name,
                do="Save it with PEFT's save_pretrained: base_model.model.LAYER.lora_A.weight and lora_B.weight.",
            )
        if match is None:
            raise CodecError(
                "An adapter changes a layer that engines cannot adapt.",
                got=name,
                do=f"Train LoRA on {', '.join(sorted(PROJECTIONS))} only.",
            )
        halves.setdefault(match[1], {})[match[2]] = tensors[name]
        named.add(match[3] or "")
    if not halves:
        raise CodecError("An adapter is empty.", got=WEIGHTS_FILE)
    if len(named) > 1:
        raise CodecError(
            "A file holds several adapters.",
            got=f"{', '.join(sorted(name or 'one without a name' for name in named))} in {WEIGHTS_FILE}",
            do="Save only one: save_pretrained(..., selected_adapters=[NAME]).",
        )
    return Adapter(modules=tuple(_module(path, half, config) for path, half in sorted(halves.items())))


def not_finite(tensors: Mapping[str, NDArray[np.float32]]) -> tuple[str, ...]:
    """Return the sorted names of the tensors with NaN or infinite values."""
    return tuple(name for name in sorted(tensors) if not np.isfinite(tensors[name]).all())


def plain_name(name: str) -> str:
    """Return a tensor's name without the name of the adapter, if it contains one. `load_adapter` must have accepted the
    tensor.
    """
    match = _TENSOR_NAME.fullmatch(name)
    assert match is not None, "it was read"
    return f"base_model.model.{match[1]}.lora_{match[2]}.weight"


def _module(path: str, half: Mapping[str, NDArray[np.float32]], config: Mapping[str, Any]) -> LoraModule:
    if set(half) != {"A", "B"}:
        raise CodecError("An adapter lacks one half of a layer's update.", got=f"{path}: only {', '.join(half)}")
    a, b = half["A"], half["B"]
    rank = _by_pattern(config.get("rank_pattern"), path, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), path, config["lora_alpha"])
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise CodecError(
            "An adapter's tensors do not have the rank that its configuration gives.",
            got=f"{path}: A {a.shape}, B {b.shape}, r = {rank}",
        )
    scaling = lora_scaling(rank, alpha, rslora=bool(config.get("use_rslora")))
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = b * np.float32(scaling)
    if not (np.isfinite(a).all() and np.isfinite(scaled).all()):
        raise CodecError("An adapter holds a value that is not finite.", got=path)
    return LoraModule(path=path, a=a, b=scaled)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise CodecError("An adapter has no readable configuration.", got=f"{path.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CodecError("An adapter's configuration is not JSON.", got=path.name) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CodecError("An adapter is not LoRA.", got=f"peft_type in {path.name}")
    unusual = [key for key, value in config.items() if value and key not in _READ_KEYS | _HARMLESS_KEYS]
    if config.get("bias", "none") != "none":
        unusual.append("bias")
    if config.get("init_lora_weights", True) not in _BASE_KEEPING_INITS:
        unusual.append("init_lora_weights")
    if unusual:
        raise CodecError(
            "An adapter uses a feature of PEFT that engines cannot apply.",
            got=", ".join(sorted(unusual)),
            do="Train plain LoRA: no DoRA, biases, saved modules or changes to the base weights.",
        )
    if not (_is_rank(config.get("r")) and _is_alpha(config.get("lora_alpha"))):
        raise CodecError("An adapter's rank or alpha is missing or out of range.", got=path.name)
    for key in ("rank_pattern", "alpha_pattern"):
        _check_pattern(key, config.get(key) or {})
    return config


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6


def _check_pattern(key: str, patterns: Any) -> None:
    is_valid = _is_rank if key == "rank_pattern" else _is_alpha
    # PEFT reads these names as regular expressions; only plain names are accepted from untrusted peers.
    plain = isinstance(patterns, dict) and all(re.fullmatch(r"\^?[A-Za-z0-9_.]+", name) for name in patterns)
    if not plain or not all(is_valid(value) for value in patterns.values()):
        raise CodecError("An adapter's pattern is not a map of plain layer names to numbers.", got=key)


def _by_pattern(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    for name, value in (patterns or {}).items():
        plain = name.removeprefix("^")
        if path == plain or (plain == name and path.endswith(f".{name}")):
            return value
    return default
