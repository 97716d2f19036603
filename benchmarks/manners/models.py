"""Base models of the node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.backends.models import MID

SMALL: Final[dict[str, Any]] = {
    **MID,
    "vocab_size": 8_192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1_536,
}
"""A model of 30 million weights, whose step takes milliseconds."""
SHAPES: Final[Mapping[str, dict[str, Any]]] = {"small": SMALL, "0.6B": MID}

Models = Callable[[str], Path]
"""Returns the directory of a base model by name, and makes the model on first use."""


def made_in(directory: Path, seed: int) -> Models:
    """Make models of random weights below `directory`."""

    def model(name: str) -> Path:
        made = directory / name
        if not made.exists():
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(Qwen3Config(**SHAPES[name]), dtype=torch.bfloat16).save_pretrained(made)
        return made

    return model
