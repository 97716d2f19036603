"""Work of both sides: models of random weights, batches of mixed lengths, adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo_hub.learner.settings import TrainingGroup, TrainingRollout
from echo_hub.run.base_model import resolve_base
from echo_shared.messages import FinishReason

LORA_RANK: Final = 16
LEARNING_RATE: Final = 1e-6
"""So small that each step repeats the work of the first step."""
SPREAD: Final = 8
"""The longest completion over the shortest, for random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a batch, and options of the computation."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    prompt_tokens: int
    longest: int
    """Tokens of the longest completion; lengths are spread evenly from an eighth of it."""
    groups: int = 2
    group_size: int = 8
    micro_batch: int = 8
    """Rollouts in one pass of TRL. A pass of Echo holds as many tokens."""
    precision: Literal["float32", "bfloat16"] = "float32"
    checkpointing: bool = False
    base: str = ""
    """A built-in base in place of random weights. Its shape is that of the case."""
    head_dim: int = 64
    spread: int = SPREAD
    """The longest completion over the shortest."""
    steps: int = 4
    """Steps; fewer, but at least two, if they take long."""
    seconds: float
    """Expected time of both sides' steps on two cores."""

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch * (self.prompt_tokens + self.longest)

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    @property
    def key_value_heads(self) -> int:
        return self.heads // 2 if self.base else max(1, self.heads // 4)

    def lengths(self, seed: int) -> list[int]:
        """Lengths of all completions, in the order of the batch."""
        even = np.linspace(self.longest / self.spread, self.longest, self.groups * self.group_size)
        return [int(length) for length in np.random.default_rng(seed).permutation(even.round())]

    def work(self, seed: int) -> tuple[int, float]:
        """Completion tokens of a step, and floating-point operations of its matrix products: forward, and backward to
        the inputs, because the weights are frozen. Prompts count once for each group."""
        tokens = sum(self.lengths(seed))
        heads = 2 * self.head_dim * (self.heads + self.key_value_heads)
        layer = self.hidden * (heads + 3 * self.intermediate)
        inputs = tokens + self.groups * self.prompt_tokens
        return tokens, 4.0 * (inputs * self.layers * layer + tokens * self.vocabulary * self.hidden)


MEDIUM: Final = Case(
    name="100 M parameters",
    seconds=75,
    hidden=768,
    layers=12,
    intermediate=2048,
    vocabulary=32_000,
    prompt_tokens=32,
    longest=96,
)
WIDE: Final = replace(MEDIUM, name="wide vocabulary", hidden=256, layers=4, intermediate=768, vocabulary=151_936)
CASES: Final = (
    MEDIUM,
    replace(
        MEDIUM, name="long prompts", seconds=40, hidden=512, layers=6, intermediate=1536, prompt_tokens=128, longest=64
    ),
    WIDE,
    replace(WIDE, name="wide vocabulary, recomputed layers", seconds=35, checkpointing=True, steps=1),
    replace(MEDIUM, name="100 M parameters, bfloat16", seconds=90, precision="bfloat16"),
    Case(
        name="long completions, the base in the box",
        seconds=40,
        base="builtin:small",
        hidden=256,
        layers=4,
        intermediate=768,
        head_dim=32,
        vocabulary=389,
        prompt_tokens=16,
        longest=312,
        spread=24,
        groups=4,
    ),
)


def make_model(case: Case, scratch: Path, seed: int) -> Path:
    """Make random weights in Hugging Face layout, once for each shape; or return the built-in base."""
    if case.base:
        return resolve_base(case.base)
    directory = scratch / f"{case.hidden}-{case.layers}-{case.intermediate}-{case.vocabulary}"
    if not directory.exists():
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=case.vocabulary,
            hidden_size=case.hidden,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.key_value_heads,
            head_dim=case.head_dim,
            intermediate_size=case.intermediate,
            max_position_embeddings=4_096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
        Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def make_batch(case: Case, seed: int) -> list[TrainingGroup]:
    """Make random tokens. Behavior log-probabilities are near those of random weights, so that some ratios are
    clipped."""
    rng = np.random.default_rng([seed, 1])
    lengths = iter(case.lengths(seed))
    groups = []
    for _ in range(case.groups):
        rollouts = [
            TrainingRollout(
                completion_ids=rng.integers(1, case.vocabulary, length).astype(np.int32),
                loss_mask=np.ones(length, dtype=bool),
                behavior_logprobs=rng.normal(-math.log(case.vocabulary), 0.1, length).astype(np.float32),
                reward=float(rng.random()),
                finish_reason=FinishReason.STOP,
                sampling_s=0.0,
            )
            for length in (next(lengths) for _ in range(case.group_size))
        ]
        prompt = rng.integers(1, case.vocabulary, case.prompt_tokens).astype(np.int32)
        groups.append(TrainingGroup(prompt_ids=prompt, rollouts=tuple(rollouts)))
    return groups


@torch.no_grad()
def fill_adapter(parameters: Mapping[str, torch.nn.Parameter], seed: int) -> None:
    """Fill the adapter with weights that are equal on both sides, and not zero."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(parameters):
        values = torch.randn(parameters[name].shape, generator=generator)
        parameters[name].copy_(values.mul_(0.02))
