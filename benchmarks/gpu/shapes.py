"""Models of the measurement and their work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.harness.models import QWEN3_06B, QWEN3_8B, Shape

ON_CPU: Final = "ECHO_BENCHMARK_GPU_ON_CPU"
"""Environment variable: if set, all parts run on the CPU with a tiny shape, for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model, and its work."""

    shape: Shape
    completion_tokens: int = 512
    """Tokens of the longest trained rollout."""
    groups: int = 8
    drawn_tokens: int = 64
    widths: tuple[int, ...] = (8, 64, 256)


_TINY: Final = Shape(hidden=64, layers=2, heads=4, key_value_heads=2, head_dim=16, intermediate=64, vocabulary=2_000)
_ON_GPU: Final = {"Qwen3-0.6B": Work(shape=QWEN3_06B), "Qwen3-8B": Work(shape=QWEN3_8B)}
_ON_CPU: Final = {
    "tiny": Work(shape=_TINY, completion_tokens=24, groups=2, drawn_tokens=4, widths=(8, 16)),
}


def works() -> dict[str, Work]:
    """Return the models by name, the most important one first."""
    return _ON_CPU if os.environ.get(ON_CPU) else _ON_GPU


def device_type() -> str:
    """Return the device of the measurement; empty if there is none."""
    if os.environ.get(ON_CPU):
        return "cpu"
    return "cuda" if torch.cuda.is_available() else ""
