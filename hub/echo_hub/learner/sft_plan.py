"""The plan of supervised fine-tuning: batches and held-out examples, determined by examples, settings and seed.

Whole prompts are held out, so that no held-out prompt is trained on with another completion. Each epoch has its own
order. A batch takes examples in that order until it has `batch_tokens` tokens, prompts included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from echo_hub.config.section import Section
from echo_hub.config.training_sections import TrainingConfig
from echo_shared.errors import LearnerError
from echo_shared.sampling.draws import derive_seed


class TokenizedDemonstration(Protocol):
    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """Token ids of the prompt [P], at least one."""

    @property
    def completion_ids(self) -> NDArray[np.int32]:
        """Token ids [T] of everything after the prompt."""

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """[T], true for trained tokens; the last one is true."""


class SftSettings(Section):
    """Settings of supervised fine-tuning."""

    epochs: Annotated[int, Field(ge=1, le=1000)] = 3
    """Times that each example is trained on."""
    batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Tokens of one optimizer update, prompts included."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-4
    """Adam's highest learning rate: QLoRA's for small models (arXiv 2305.14314, table 9)."""
    heldout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the prompts that is measured and never trained on."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed for the choice of held-out prompts and each epoch's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftPlan:
    """Batches and held-out examples; create it with `make_plan`."""

    heldout: tuple[TokenizedDemonstration, ...]
    batches: tuple[tuple[TokenizedDemonstration, ...], ...]
    """Examples of each optimizer update, in order."""
    epoch_ends: tuple[int, ...]
    """Number of the update that ends each epoch, counted from 1."""

    def training(self, settings: SftSettings, run: TrainingConfig) -> TrainingConfig:
        """Return the run's training settings with this plan's schedule: warm-up over 1/30 of the updates, then linear
        decay to 0.
        """
        own: dict[str, Any] = {
            "steps": len(self.batches),
            "learning_rate": settings.learning_rate,
            "warmup_steps": len(self.batches) // 30,
            "schedule": "linear",
            "final_share": 0.0,
        }
        return run.model_copy(update=own)


def make_plan(examples: Sequence[TokenizedDemonstration], settings: SftSettings) -> SftPlan:
    """Return the plan; equal inputs give equal plans. Raises LearnerError if all examples would be held out."""
    held = _held_out(examples, settings)
    trained = [example for example, out in zip(examples, held, strict=True) if not out]
    if not trained:
        raise LearnerError(
            "No demonstration is left to train on.",
            got=f"{len(examples)} demonstrations, all with held-out prompts",
            do="Give more demonstrations, or --heldout 0.",
        )
    epochs = [_batches(trained, settings, epoch) for epoch in range(settings.epochs)]
    return SftPlan(
        heldout=tuple(example for example, out in zip(examples, held, strict=True) if out),
        batches=tuple(batch for epoch in epochs for batch in epoch),
        epoch_ends=tuple(accumulate(map(len, epochs))),
    )


def _held_out(examples: Sequence[TokenizedDemonstration], settings: SftSettings) -> list[bool]:
    """Return True for each example that is held out. A hash of its prompt decides, so adding examples keeps most
    choices.
    """
    prompts = [derive_seed("sft", settings.seed, example.prompt_ids.tobytes().hex()) for example in examples]
    distinct = sorted(set(prompts))
    out = set(distinct[: math.ceil(settings.heldout * len(distinct))])
    return [prompt in out for prompt in prompts]


def _batches(
    examples: Sequence[TokenizedDemonstration], settings: SftSettings, epoch: int
) -> list[tuple[TokenizedDemonstration, ...]]:
    order = np.random.default_rng(derive_seed("sft", settings.seed, epoch)).permutation(len(examples))
    batches: list[tuple[TokenizedDemonstration, ...]] = []
    batch: list[TokenizedDemonstration] = []
    tokens = 0
    for number in order.tolist():
        batch.append(examples[number])
        tokens += len(examples[number].prompt_ids) + len(examples[number].completion_ids)
        if tokens >= settings.batch_tokens:
            batches.append(tuple(batch))
            batch, tokens = [], 0
    return [*batches, tuple(batch)] if batch else batches
