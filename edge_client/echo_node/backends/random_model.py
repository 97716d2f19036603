"""Makes a model with random weights, for measurements. It computes as fast as a trained model of its size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

_LAYERS: Final = 18
_HIDDEN: Final = 512
_HEADS: Final = 8
_KV_HEADS: Final = 4
_HEAD_DIM: Final = 64
_INTERMEDIATE: Final = 1_536
_VOCABULARY: Final = 32_768
_SCALE: Final = 0.02


def make_random_model(directory: Path) -> Path:
    """Write a Qwen3 with 73 M parameters in float16, always with the same weights. Return `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(), indent=2), encoding="utf-8")
    rng = np.random.default_rng(0)
    tensors = {name: _weights(rng, shape) for name, shape in _shapes().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _weights(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float16]:
    if len(shape) == 1:
        return np.ones(shape, np.float16)
    return (rng.standard_normal(shape, np.float32) * np.float32(_SCALE)).astype(np.float16)


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (_HIDDEN,),
        "post_attention_layernorm": (_HIDDEN,),
        "self_attn.q_norm": (_HEAD_DIM,),
        "self_attn.k_norm": (_HEAD_DIM,),
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM),
        "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
    }
    for number in range(_LAYERS):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": 4_096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float16",
    }
