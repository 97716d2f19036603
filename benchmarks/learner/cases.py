"""Work of both sides: models of random weights, batches of mixed lengths, adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch

from benchmarks.harness.models import Shape, random_model
from echo_hub.learner.settings import TrainingGroup, TrainingRollout
from echo_hub.run.base_model import resolve_base
from echo_shared.wire.messages import FinishReason

LEARNING_RATE: Final = 1e-6
"""So small that each step repeats the work of the first step on almost unchanged weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a batch, and options of the computation."""

    name: str
    shape: Shape
    prompt_tokens: int
    longest: int
    """Tokens of the longest completion."""
    spread: int = 8
    """Length of the longest completion over that of the shortest; lengths in between are spread evenly."""
    groups: int = 2
    group_size: int = 8
    micro_batch: int = 8
    """Rollouts in one pass of TRL. A pass of Echo holds as many tokens."""
    precision: Literal["float32", "bfloat16"] = "float32"
    checkpointing: bool = False
    base: str = ""
    """A built-in base of this shape, in place of random weights."""
    steps: int = 4
    """Steps; fewer, but at least two, if they take long."""
    seconds: float
    """Expected seconds of both sides' steps on two cores."""

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch * (self.prompt_tokens + self.longest)

    def lengths(self, seed: int) -> list[int]:
        """Lengths of all completions, in the order of the batch."""
        even = np.linspace(self.longest / self.spread, self.longest, self.groups * self.group_size)
        return [int(length) for length in np.random.default_rng(seed).permutation(even.round())]

    def work(self, seed: int) -> tuple[int, float]:
        """Completion tokens of a step, and operations of its matrix products. Prompts count once for each group."""
        tokens = sum(self.lengths(seed))
        return tokens, self.shape.operations(tokens + self.groups * self.prompt_tokens, tokens)


def shape_of(hidden: int, layers: int, intermediate: int, vocabulary: int) -> Shape:
    heads = hidden // 64
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_value_heads=max(1, heads // 4),
        head_dim=64,
        intermediate=intermediate,
        vocabulary=vocabulary,
    )


MEDIUM: Final = Case(
    name="100 M parameters", seconds=75, shape=shape_of(768, 12, 2_048, 32_000), prompt_tokens=32, longest=96
)
WIDE: Final = replace(MEDIUM, name="wide vocabulary", shape=shape_of(256, 4, 768, 151_936))
CASES: Final = (
    MEDIUM,
    replace(
        MEDIUM, name="long prompts", seconds=40, shape=shape_of(512, 6, 1_536, 32_000), prompt_tokens=128, longest=64
    ),
    WIDE,
    replace(WIDE, name="wide vocabulary, recomputed layers", seconds=35, checkpointing=True, steps=1),
    replace(MEDIUM, name="100 M parameters, bfloat16", seconds=90, precision="bfloat16"),
    Case(
        name="long completions, the base in the box",
        seconds=40,
        base="builtin:small",
        shape=Shape(hidden=256, layers=4, heads=8, key_value_heads=4, head_dim=32, intermediate=768, vocabulary=389),
        prompt_tokens=16,
        longest=312,
        spread=24,
        groups=4,
    ),
)


def make_model(case: Case, scratch: Path, seed: int) -> Path:
    """Make random weights, once for each shape; or return the built-in base."""
    if case.base:
        return resolve_base(case.base)
    directory = scratch / f"{case.shape.hidden}-{case.shape.layers}-{case.shape.vocabulary}"
    return random_model(directory, case.shape, seed, dtype=torch.float32, stop_id=0)


def make_batch(case: Case, seed: int) -> list[TrainingGroup]:
    """Make random tokens. Behavior log-probabilities are near those of random weights, so that some ratios are
    clipped."""
    rng, vocabulary = np.random.default_rng([seed, 1]), case.shape.vocabulary
    lengths = iter(case.lengths(seed))
    groups = []
    for _ in range(case.groups):
        rollouts = [
            TrainingRollout(
                completion_ids=rng.integers(1, vocabulary, length).astype(np.int32),
                loss_mask=np.ones(length, dtype=bool),
                behavior_logprobs=rng.normal(-math.log(vocabulary), 0.1, length).astype(np.float32),
                reward=float(rng.random()),
                finish_reason=FinishReason.STOP,
                sampling_s=0.0,
            )
            for length in (next(lengths) for _ in range(case.group_size))
        ]
        prompt = rng.integers(1, vocabulary, case.prompt_tokens).astype(np.int32)
        groups.append(TrainingGroup(prompt_ids=prompt, rollouts=tuple(rollouts)))
    return groups


@torch.no_grad()
def fill_adapter(parameters: Mapping[str, torch.nn.Parameter], seed: int) -> None:
    """Fill the adapter with weights that are equal on both sides, and not zero."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(parameters):
        values = torch.randn(parameters[name].shape, generator=generator)
        parameters[name].copy_(values.mul_(0.02))
