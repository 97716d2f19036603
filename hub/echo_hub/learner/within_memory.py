"""Run a step on a device that may have too little memory: halve the micro-batches and restart until it fits.

The result is the same except for rounding, because the loss is a sum over tokens, independent of micro-batches. A
failed attempt leaves no trace: its gradient is dropped, and if the step has several updates, the earlier ones are
undone and repeated.

Ranks compute each layer together, so a rank that fails leaves the others waiting. Therefore, with several ranks, the
process ends, and all others with it. The hub restarts them from the newest checkpoint, and `Cuts` tells them to use
smaller micro-batches.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch

from echo_hub.learner import checkpoint
from echo_hub.learner.cuts import ChunkSizes, Cuts
from echo_hub.learner.history import NO_HISTORY, History
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_hub.learner.step import StepOutcome, screened_step, smaller
from echo_shared.errors import LearnerError
from echo_shared.process.out_of_memory import ran_out
from echo_shared.records.step_figures import FITTED_TOKENS, OUT_OF_MEMORY

log = logging.getLogger(__name__)


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DivisibleStep(Protocol[T_co]):
    """A computation that can be divided into smaller micro-batches without changing its result."""

    def compute(self, cut: ChunkSizes) -> T_co:
        """Compute the step with these memory settings."""

    def halved(self, cut: ChunkSizes) -> int | None:
        """Return the `micro_batch_tokens` that halves the largest micro-batches; None if each holds a single
        rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScreenedStep:
    """A training step of the learner, in the form that `within_memory` can divide into smaller micro-batches."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    groups: Sequence[TrainingGroup]
    settings: LearnerSettings
    learner_version: int
    history: History

    def compute(self, cut: ChunkSizes) -> StepOutcome:
        return screened_step(
            self.policy,
            self.optimizer,
            self.groups,
            _cut(self.settings, cut),
            learner_version=self.learner_version,
            history=self.history,
        )

    def halved(self, cut: ChunkSizes) -> int | None:
        settings = _cut(self.settings, cut)
        return smaller(self.policy.ranks, self.groups, settings, learner_version=self.learner_version)


def step_within_memory(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[TrainingGroup],
    settings: LearnerSettings,
    *,
    cuts: Cuts,
    learner_version: int = 0,
    history: History = NO_HISTORY,
) -> StepOutcome:
    """Run `screened_step` with the step's memory settings. If memory is too small, try smaller micro-batches and record
    them in `cuts`.

    Raises LearnerError if memory is too small for a single rollout.
    """
    fitted = within_memory(
        policy,
        optimizer,
        _ScreenedStep(
            policy=policy,
            optimizer=optimizer,
            groups=groups,
            settings=settings,
            learner_version=learner_version,
            history=history,
        ),
        cuts=cuts,
        step=learner_version + 1,
        updates=settings.training.updates_per_step,
    )
    figures = {FITTED_TOKENS.key: fitted.cut.micro_batch_tokens, OUT_OF_MEMORY.key: fitted.halvings}
    outcome = fitted.result
    return replace(outcome, metrics={**outcome.metrics, **{key: float(of) for key, of in figures.items()}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted(Generic[T]):
    """A computation's result, and the memory settings that made the computation fit."""

    result: T
    cut: ChunkSizes
    halvings: int
    """Number of times that micro-batches were halved and the computation restarted."""


def within_memory(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    divisible: DivisibleStep[T],
    *,
    cuts: Cuts,
    step: int,
    updates: int = 1,
) -> Fitted[T]:
    """Compute a step, which makes `updates` optimizer updates, with its memory settings. If memory is too small, try
    smaller micro-batches and record them in `cuts`.

    Raises LearnerError if memory is too small for a single rollout.
    """
    cut = cuts.at(step)
    assert cut is not None, "a cut exists from the first step on"
    fresh = not optimizer.state
    held = checkpoint.take(policy, optimizer) if updates > 1 else None
    halvings = 0
    while True:
        policy.checkpoints = cut.gradient_checkpointing
        broken_off = ""
        try:
            result = divisible.compute(cut)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            broken_off = str(error) or type(error).__name__
            tokens = divisible.halved(cut)
            if tokens is not None:
                cut = replace(cut, micro_batch_tokens=tokens)
                cuts.put(step, cut)
                if policy.ranks.count > 1:
                    log.error("out of memory; all ranks restart with micro-batches of %d tokens", tokens)
                    raise
        if not broken_off:
            return Fitted(result=result, cut=cut, halvings=halvings)
        # Free memory outside the handler: inside it, the traceback still refers to the failed attempt's tensors.
        _undo(policy, optimizer, held, fresh=fresh)
        if tokens is None:
            raise LearnerError(
                "The learner's device has too little memory for a single rollout.", got=broken_off, do=_remedy(cut)
            )
        halvings += 1
        log.warning("out of memory, the step restarts with micro-batches of %d tokens: %s", tokens, broken_off)


def _cut(settings: LearnerSettings, cut: ChunkSizes) -> LearnerSettings:
    # Skip validation: after several halvings, the value may be below the settings' minimum.
    learner = settings.learner.model_copy(update={"micro_batch_tokens": cut.micro_batch_tokens})
    return settings.model_copy(update={"learner": learner})


def _undo(
    policy: Policy, optimizer: torch.optim.Optimizer, held: dict[str, torch.Tensor] | None, *, fresh: bool
) -> None:
    """Restore policy and optimizer to their state before the failed attempt, and free the attempt's memory."""
    optimizer.zero_grad(set_to_none=True)
    if held is not None:
        checkpoint.restore(held, policy, optimizer)
    elif fresh:
        optimizer.state.clear()
    gc.collect()  # The unfinished autograd graph may contain reference cycles.
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()


def _remedy(cut: ChunkSizes) -> str:
    words = "Free memory on the device, or lower sampling.max_tokens"
    more = "" if cut.gradient_checkpointing else ", or set learner.gradient_checkpointing to true"
    return f"{words}, or set learner.base_bits to 4, or use a smaller base model{more}."
