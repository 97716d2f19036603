"""Supervised fine-tuning of the policy on demonstrations, for the adapter that a run starts from.

An update is a learner's step with another loss. It uses the same packed micro-batches, memory settings, optimizer,
clipping and outlier rule for gradient norms. The loss is the mean of -log π over all trained tokens of the update's
batch, at temperature 1: cross-entropy, as in TRL's SFTTrainer. Prompts, and tokens between two replies, have no loss.

Checkpoints are written regularly, in the learner's layout, in parallel to the next updates. Training resumed from one
gives the same adapter as uninterrupted training, bit for bit on a CPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from echo_hub.learner import checkpoint, determinism
from echo_hub.learner.batch import build_micro_batches, halved
from echo_hub.learner.cuts import ChunkSizes, Cuts
from echo_hub.learner.history import History
from echo_hub.learner.norms import WINDOW, limit
from echo_hub.learner.policy import Policy
from echo_hub.learner.probe import first_cut, place
from echo_hub.learner.schedule import share_of_highest
from echo_hub.learner.settings import LearnerSettings, StepTold
from echo_hub.learner.sft_plan import SftPlan, TokenizedDemonstration
from echo_hub.learner.step import make_optimizer
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_hub.learner.within_memory import within_memory
from echo_hub.learner.writer import CheckpointWriter

_HELD_OUT: Final = "heldout."
_TRAINED: Final = "trained."


@dataclass(frozen=True, slots=True, kw_only=True)
class SftProgress:
    """The state of fine-tuning. Losses are nats per token."""

    update: int = 0
    """Number of optimizer updates made so far."""
    heldout_losses: tuple[float, ...] = ()
    """Loss on the held-out examples before the first epoch and after each epoch; empty without held-out examples."""
    training_losses: tuple[float, ...] = ()
    """Mean loss of each finished epoch's tokens, measured while training on them."""
    nats: float = 0.0
    """Summed loss of the trained tokens in the current epoch, in nats."""
    tokens: int = 0
    """Number of trained tokens in the current epoch so far."""
    outliers: int = 0
    """Updates that were not applied, because their gradient norm was an outlier."""
    norms: tuple[float, ...] = ()
    """Gradient norms of the newest updates, with which the next norm is compared."""

    def frame(self) -> dict[str, float]:
        """Return the progress as JSON values for a checkpoint, without `update` and `norms`, which the checkpoint
        stores elsewhere.
        """
        lists = {_HELD_OUT: self.heldout_losses, _TRAINED: self.training_losses}
        losses = {f"{kind}{number}": loss for kind, of_all in lists.items() for number, loss in enumerate(of_all)}
        return {**losses, "nats": self.nats, "tokens": self.tokens, "outliers": self.outliers}

    @classmethod
    def of(cls, state: checkpoint.CheckpointState) -> SftProgress:
        frame = state.told[state.step].metrics

        def losses(kind: str) -> tuple[float, ...]:
            return tuple(frame[f"{kind}{number}"] for number in range(sum(key.startswith(kind) for key in frame)))

        return cls(
            update=state.step,
            heldout_losses=losses(_HELD_OUT),
            training_losses=losses(_TRAINED),
            nats=frame["nats"],
            tokens=int(frame["tokens"]),
            outliers=int(frame["outliers"]),
            norms=state.history.norms,
        )


class SftWatcher(Protocol):
    """Follows fine-tuning, for example to show it."""

    def tell(self, progress: SftProgress) -> None: ...


class Finetuning:
    """A fine-tuning job. Create it with `open` and call `run`; then `policy` holds the adapter."""

    def __init__(self, policy: Policy, settings: LearnerSettings, plan: SftPlan, checkpoints: Path) -> None:
        """`settings.training` must be the result of `SftPlan.training`."""
        self.policy = policy
        self.progress = SftProgress()
        self._settings = settings
        self._plan = plan
        self._checkpoints = checkpoints
        self._optimizer = make_optimizer(policy, settings.training)
        self._writer = CheckpointWriter()
        self._cuts = Cuts(checkpoints)

    @classmethod
    def open(
        cls, settings: LearnerSettings, plan: SftPlan, checkpoints: Path, *, start_from: Path | None
    ) -> Finetuning:
        """Load the base model, and then the newest checkpoint; without a checkpoint, the adapter in `start_from`. None
        means a new adapter.

        Raises LearnerError if a file cannot be loaded or does not fit.
        """
        # Makes matrix products on CUDA deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        disable_progress_bar()  # Transformers would show a progress bar while it loads the base.
        if settings.learner.threads:
            torch.set_num_threads(settings.learner.threads)
        determinism.choose(deterministic=settings.learner.deterministic)
        finetuning = cls(Policy.load(settings), settings, plan, checkpoints)
        finetuning._resume(start_from)
        return finetuning

    def _resume(self, start_from: Path | None) -> None:
        newest = next(iter(checkpoint.complete(self._checkpoints)), None)
        if newest is not None:
            checkpoint.restore(checkpoint.read(newest, self.policy), self.policy, self._optimizer)
            self.progress = SftProgress.of(newest)
        elif start_from is not None:
            self.policy.set_adapter(self.policy.read_adapter(start_from))
        self._cuts = Cuts.read(self._checkpoints, place=place(self.policy, self._settings.learner))
        first = self.progress.update + 1
        if self._cuts.at(first) is None:
            self._cuts.put(first, first_cut(self.policy, self._settings), write=self.policy.device.type == "cuda")

    def run(self, *, watcher: SftWatcher, stop: threading.Event) -> bool:
        """Train to the end, or until `stop` is set, which is checked between updates. Return True if training reached
        the end.

        `watcher` is told after each update. All files are written when this returns. Raises LearnerError if memory is
        too small for one example, StorageError if the disk fails.
        """
        if not self.progress.heldout_losses:
            self.progress = replace(self.progress, heldout_losses=self._measured())
        last = len(self._plan.batches)
        while self.progress.update < last and not stop.is_set():
            self._update(self.progress.update + 1)
            if self.progress.update in self._plan.epoch_ends:
                self._end_epoch()
            if self.progress.update % self._settings.learner.checkpoint_every == 0 or self.progress.update == last:
                self._save()
            watcher.tell(self.progress)
        self._writer.wait()
        if self.progress.update and not (self._checkpoints / f"step-{self.progress.update:06d}").is_dir():
            self._save()
            self._writer.wait()
        return self.progress.update == last

    def _update(self, update: int) -> None:
        examples = self._plan.batches[update - 1]
        tokens = sum(int(example.loss_mask.sum()) for example in examples)
        groups = _groups(examples, tokens)
        rate = self._settings.training.learning_rate * share_of_highest(self._settings.training, update)
        for of_group in self._optimizer.param_groups:
            of_group["lr"] = rate
        fitted = within_memory(
            self.policy,
            self._optimizer,
            _Update(self, groups),
            cuts=self._cuts,
            step=update,
        )
        loss, norm, is_applied = fitted.result
        before = self.progress
        self.progress = replace(
            before,
            update=update,
            nats=before.nats + loss * tokens,
            tokens=before.tokens + tokens,
            outliers=before.outliers + (not is_applied),
            norms=(*before.norms, norm)[-WINDOW:] if 0 < norm < float("inf") else before.norms,
        )

    def step(self, groups: Sequence[WeightedGroup], cut: ChunkSizes) -> tuple[float, float, bool]:
        """Return the batch's mean loss, its gradient norm before clipping, and True if the update was applied."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = accumulate_gradient(self.policy, groups, cut)
        clip = self._settings.training.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters.values(), clip))
        # A NaN norm fails both comparisons, and an infinite norm the second one, so an update with such a norm is not
        # applied.
        is_applied = norm <= limit(self.progress.norms) and norm < float("inf")
        if is_applied:
            self._optimizer.step()
        return loss, norm, is_applied

    def _end_epoch(self) -> None:
        before = self.progress
        self.progress = replace(
            before,
            heldout_losses=(*before.heldout_losses, *self._measured()),
            training_losses=(*before.training_losses, before.nats / before.tokens),
            nats=0.0,
            tokens=0,
        )

    def _measured(self) -> tuple[float, ...]:
        cut = self._cuts.at(self.progress.update + 1)
        assert cut is not None, "a cut exists from the first update on"
        heldout = self._plan.heldout
        return (mean_loss(self.policy, heldout, cut),) if heldout else ()

    def _save(self) -> None:
        self._writer.wait()
        tensors = checkpoint.take(self.policy, self._optimizer)
        told: Mapping[int, StepTold] = {self.progress.update: StepTold(metrics=self.progress.frame())}
        state = checkpoint.CheckpointState(
            step=self.progress.update, told=told, history=History(norms=self.progress.norms)
        )

        def write() -> None:
            checkpoint.save(self._checkpoints, self.policy, tensors, state)
            checkpoint.prune(self._checkpoints, kept=1, milestones=0)

        self._writer.start(write)


@dataclass(frozen=True, slots=True)
class _Update:
    """One optimizer update of a fine-tuning job, in the form that `within_memory` needs to try smaller
    micro-batches.
    """

    job: Finetuning
    groups: Sequence[WeightedGroup]

    def compute(self, cut: ChunkSizes) -> tuple[float, float, bool]:
        return self.job.step(self.groups, cut)

    def halved(self, cut: ChunkSizes) -> int | None:
        return halved(self.groups, cut.micro_batch_tokens)


def accumulate_gradient(policy: Policy, groups: Sequence[WeightedGroup], cut: ChunkSizes) -> float:
    """Add the gradient of Σ weight · -log π over the trained tokens of `groups`, and return the sum."""
    values = []
    for batch in build_micro_batches(groups, micro_batch_tokens=cut.micro_batch_tokens):
        on_device = batch.to(policy.device)
        value = -(policy.logprobs(on_device) * on_device.weights_N).sum()
        determinism.backward(value)
        values.append(value.detach())
    return float(sum(torch.stack(values).tolist()))


@torch.no_grad()
def mean_loss(policy: Policy, examples: Sequence[TokenizedDemonstration], cut: ChunkSizes) -> float:
    """Return the mean of -log π over the trained tokens of `examples`, in nats. There must be at least one token."""
    sums, tokens = [], 0
    for batch in build_micro_batches(_groups(examples, 1), micro_batch_tokens=cut.micro_batch_tokens):
        logprobs_N = policy.logprobs(batch.to(policy.device))
        sums.append(logprobs_N.sum())
        tokens += len(logprobs_N)
    return -float(sum(torch.stack(sums).tolist())) / tokens


def _groups(examples: Sequence[TokenizedDemonstration], tokens: int) -> list[WeightedGroup]:
    return list(_weighted(examples, 1 / tokens))


def _weighted(examples: Sequence[TokenizedDemonstration], weight: float) -> Iterator[WeightedGroup]:
    for number, example in enumerate(examples):
        drawn = int(example.loss_mask.sum())
        rollout = WeightedRollout(
            completion_ids=example.completion_ids,
            loss_mask=example.loss_mask,
            behavior_logprobs=np.zeros(len(example.completion_ids), np.float32),
            advantages=np.ones(drawn),
            weight=weight,
            number=number,
        )
        yield WeightedGroup(prompt_ids=example.prompt_ids, rollouts=(rollout,), number=number)
