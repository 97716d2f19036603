"""The shape of a model, from its config.json or its GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf

from echo_shared.delta.base_weights import unsupported_model
from echo_shared.errors import BackendError
from echo_shared.gguf.families import FAMILIES
from echo_shared.gguf.family import Family
from echo_shared.gguf.file_names import first_part
from echo_shared.gguf.summary import read_summary

_READ_FROM_GGUF: Final = ("llama", "qwen2", "qwen3")
"""Architectures of GGUF files without config.json that can be used: those whose metadata suffices for adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and limits of a model in llama.cpp."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    """Largest number of tokens of a text for which llama.cpp and transformers compute the same values."""
    kv_values_per_token: int
    """How many numbers the KV cache holds for one token."""
    state_values: int
    """How many numbers the layers with a state of constant size (instead of a KV cache) hold for one sequence of any
    length.
    """
    context_changes_factors: bool
    """True: rotary embeddings depend on the context length that llama.cpp was given, instead of the text's length."""
    tied_embeddings: bool
    family: Family

    @property
    def is_recurrent(self) -> bool:
        """True if some layers keep a state that cannot be cut back to an earlier token."""
        return self.state_values > 0


def given_gguf(base_dir: Path) -> Path | None:
    """Return the GGUF file if the base model is a GGUF file, or its first part if the model is split; else None."""
    return None if any(base_dir.glob("*.safetensors")) else first_part(sorted(base_dir.glob("*.gguf")))


def read_shape(base_dir: Path) -> ModelShape:
    """Return the shape of the model in `base_dir`. Raises BackendError if llama.cpp cannot run it here."""
    given = given_gguf(base_dir)
    if given is None or (base_dir / "config.json").exists():
        return _shape_of_config(base_dir)
    return _shape_of_gguf(given)


def _shape_of_config(base_dir: Path) -> ModelShape:
    try:
        return _shape(json.loads((base_dir / "config.json").read_bytes()))
    except (OSError, ArithmeticError, ValueError, TypeError, KeyError) as error:
        raise BackendError("The base model's config.json cannot be used.", got=f"{error!r}") from error


def _shape(config: Mapping[str, Any]) -> ModelShape:
    name = config["model_type"]
    if name not in FAMILIES:
        raise unsupported_model(f"model_type {name}")
    family = FAMILIES[name].of(config)
    problems = list(family.problems())
    if problems:
        raise unsupported_model(f"{name} with {'; '.join(problems)}")
    return ModelShape(
        architecture=gguf.MODEL_ARCH_NAMES[family.arch],
        num_layers=family.num_layers,
        hidden_size=family.hidden_size,
        vocab_size=family.vocab_size,
        max_positions=family.max_positions,
        kv_values_per_token=family.kv_values_per_token,
        state_values=family.state_values,
        context_changes_factors=family.rope.kind == "longrope",
        tied_embeddings=family.tied_embeddings,
        family=family,
    )


def _shape_of_gguf(path: Path) -> ModelShape:
    try:
        summary = read_summary(path)
        architecture = summary.metadata.get("general.architecture")
        if architecture not in _READ_FROM_GGUF:
            raise unsupported_model(f"a GGUF file of architecture {architecture}")
        hidden_size, vocab_size = summary.sizes["token_embd.weight"]
        own = {key.removeprefix(f"{architecture}."): value for key, value in summary.metadata.items()}
        return _shape(
            {
                "model_type": architecture,
                "num_hidden_layers": own["block_count"],
                "hidden_size": hidden_size,
                "intermediate_size": own["feed_forward_length"],
                "num_attention_heads": own["attention.head_count"],
                "num_key_value_heads": own.get("attention.head_count_kv"),
                "head_dim": own.get("attention.key_length") or hidden_size // own["attention.head_count"],
                "vocab_size": vocab_size,
                "max_position_embeddings": own["context_length"],
                "tie_word_embeddings": "output.weight" not in summary.sizes,
            }
        )
    except (OSError, ArithmeticError, ValueError, TypeError, KeyError, IndexError) as error:
        raise BackendError("The base model's GGUF file cannot be used.", got=f"{path.name}: {error!r}") from error
