"""Shapes of models with random weights, from the models' config.json, without unused rows of the vocabulary."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Final

import torch

from benchmarks.harness import models

ON_CPU: Final = "ECHO_BENCHMARK_GPU_ON_CPU"
"""Name of an environment variable: if set, all parts run on the CPU with a tiny shape, for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(models.Shape):
    """A model's shape, and the amount of work for its measurements."""

    completion_tokens: int = 512
    """Tokens of the longest trained rollout."""
    groups: int = 8
    drawn_tokens: int = 64
    widths: tuple[int, ...] = (8, 64, 256)
    tiny: bool = False


SHAPES: Final = {
    "Qwen3-0.6B": Shape(**asdict(models.QWEN3_06B)),
    "Qwen3-8B": Shape(**asdict(models.QWEN3_8B)),
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
    """Return the type of the device to measure (`cuda` or `cpu`); "" if there is none."""
    if os.environ.get(ON_CPU):
        return "cpu"
    return "cuda" if torch.cuda.is_available() else ""
