"""Shapes of models with random weights, from their config.json, without unused rows of the vocabulary."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import Qwen3Config

ON_CPU: Final = "ECHO_BENCHMARK_GPU_ON_CPU"
"""Environment variable: if set, all parts run on the CPU with a tiny shape, for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model, and its work."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int = 151_936
    tied: bool
    completion_tokens: int = 512
    """Tokens of the longest trained rollout."""
    groups: int = 8
    drawn_tokens: int = 64
    widths: tuple[int, ...] = (8, 64, 256)
    tiny: bool = False

    def config(self) -> Any:
        """Return the configuration for transformers."""
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            max_position_embeddings=4_096,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
        )

    def operations(self, inputs: int, trained: int) -> float:
        """Operations of a step's matrix products: forward, and backward to the inputs, because the weights are
        frozen."""
        attention = self.head_dim * (2 * self.heads + 2 * self.key_value_heads)
        layer = self.hidden * (attention + 3 * self.intermediate)
        return 4.0 * (inputs * self.layers * layer + trained * self.vocabulary * self.hidden)


SHAPES: Final = {
    "Qwen3-0.6B": Shape(
        hidden=1_024, layers=28, heads=16, key_value_heads=8, head_dim=128, intermediate=3_072, tied=True
    ),
    "Qwen3-8B": Shape(
        hidden=4_096, layers=36, heads=32, key_value_heads=8, head_dim=128, intermediate=12_288, tied=False
    ),
    "tiny": Shape(
        hidden=32,
        layers=2,
        heads=4,
        key_value_heads=2,
        head_dim=8,
        intermediate=64,
        vocabulary=2_000,
        tied=True,
        completion_tokens=24,
        groups=2,
        drawn_tokens=4,
        widths=(8, 16),
        tiny=True,
    ),
}


def device_type() -> str:
    """Return the device of the measurement; empty if there is none."""
    if os.environ.get(ON_CPU):
        return "cpu"
    return "cuda" if torch.cuda.is_available() else ""
