"""The memory settings of the first step: from the configuration, or the largest that fit in a GPU's memory.

Memory is measured with the step's own forward and backward pass, `step.accumulate_gradient`, on random tokens.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import psutil
import torch

from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner import fit
from echo_hub.learner.batch import build_micro_batches
from echo_hub.learner.cuts import ChunkSizes
from echo_hub.learner.objectives.loss import StepLoss
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.step import accumulate_gradient
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_shared.process.out_of_memory import ran_out

log = logging.getLogger(__name__)

_ADAM_BYTES: Final = 8
"""Bytes of Adam's state for each trained weight: two float32 averages, allocated in the first step."""
_LONGEST_ROW: Final = 512
"""Length of the longest random rollout in the measurement, in tokens."""


class MemoryMeter(Protocol):
    def free_bytes(self) -> int:
        """Return the bytes that can still be allocated."""

    peak_bytes: int
    """Peak of the allocated bytes in the last `with measuring()` block, minus the bytes allocated before that block."""

    def measuring(self) -> AbstractContextManager[None]:
        """Measure the peak memory that is allocated inside the `with` block."""


class CudaMeter:
    """Measures a CUDA device, by PyTorch's and the driver's counters."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = 0

    def free_bytes(self) -> int:
        """Return the bytes that the driver reports as free, plus those that PyTorch has reserved but does not use."""
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + int(kept)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the peak inside the `with` block, as PyTorch counts the sizes of tensors."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = int(torch.cuda.memory_allocated(self._device))
        yield
        torch.cuda.synchronize(self._device)
        self.peak_bytes = int(torch.cuda.max_memory_allocated(self._device)) - before


def place(policy: Policy, learner: LearnerConfig) -> str:
    """Return a text that identifies device and settings. Memory settings measured earlier in the run are valid only
    while this text stays equal.
    """
    if policy.device.type == "cuda":
        name = torch.cuda.get_device_name(policy.device)
        memory_bytes = torch.cuda.get_device_properties(policy.device).total_memory
    else:
        name, memory_bytes = policy.device.type, psutil.virtual_memory().total
    wanted = f"{learner.micro_batch_tokens} tokens, checkpointing {learner.gradient_checkpointing}"
    return f"{policy.ranks.count} x {name}, {memory_bytes / 2**30:.0f} GiB; {wanted}"


def first_cut(policy: Policy, settings: LearnerSettings, meter: MemoryMeter | None = None) -> ChunkSizes:
    """Return the memory settings for the first step, the same at every rank.

    `meter` measures the memory of the policy's device. None means: CUDA's counters on a CUDA device, else no
    measurement.
    """
    learner = settings.learner
    again = None if learner.gradient_checkpointing == "auto" else learner.gradient_checkpointing
    if meter is None and policy.device.type == "cuda":
        meter = CudaMeter(policy.device)
    if meter is None or (learner.micro_batch_tokens and again is not None):
        return ChunkSizes(micro_batch_tokens=learner.tokens_at_once, gradient_checkpointing=bool(again))
    trained = sum(parameter.numel() for parameter in policy.parameters.values())
    free_bytes = max(0, meter.free_bytes() - _ADAM_BYTES * trained)
    # All ranks must measure the same sizes, because they compute each layer together. So all use the smallest free
    # memory.
    free_bytes = min(said["free"] for said in policy.ranks.exchange({"free": free_bytes}))
    cut = fit.choose(
        _RandomPass(policy, settings, meter),
        micro_batch_tokens=learner.micro_batch_tokens,
        gradient_checkpointing=again,
        longest_tokens=2 * settings.max_tokens,
        free_bytes=free_bytes,
    )
    log.info("%.1f GiB are free; micro-batches: %s", free_bytes / 2**30, cut)
    return cut


@dataclass(frozen=True, slots=True)
class _RandomPass:
    """A forward and backward pass of one micro-batch with random tokens, measured at all ranks."""

    policy: Policy
    settings: LearnerSettings
    meter: MemoryMeter

    def peak_bytes(self, tokens: int, *, gradient_checkpointing: bool) -> int | None:
        self.policy.checkpoints = gradient_checkpointing
        own = self._own_peak_bytes(tokens)
        log.info("%d tokens, checkpointing %s: %s bytes", tokens, gradient_checkpointing, own)
        peaks = [said["peak"] for said in self.policy.ranks.exchange({"peak": own})]
        return None if None in peaks else max(peaks)

    def _own_peak_bytes(self, tokens: int) -> int | None:
        """Return this rank's peak; None if memory is too small.

        With several ranks, the device's error is raised instead: the other ranks wait for this one and cannot continue.
        """
        policy = self.policy
        (batch,) = build_micro_batches([_random_group(policy.vocab_size, tokens)], micro_batch_tokens=tokens)
        objective = self.settings.objective
        loss = StepLoss(objective, entropy_coefficient=float(objective.trains_entropy))
        peak: int | None = None
        try:
            with self.meter.measuring():
                accumulate_gradient(policy, batch, loss)
            peak = self.meter.peak_bytes
        except (MemoryError, RuntimeError) as error:
            if policy.ranks.count > 1 or not ran_out(error):
                raise
        for parameter in policy.parameters.values():
            parameter.grad = None
        if peak is None:
            gc.collect()
        return peak


def _random_group(vocab_size: int, tokens: int) -> WeightedGroup:
    """Return a group of rollouts with `tokens` tokens in all, as a micro-batch counts them."""
    rng = np.random.default_rng(tokens)
    length = min(_LONGEST_ROW, tokens)
    rollouts = [
        WeightedRollout(
            completion_ids=rng.integers(0, vocab_size, length).astype(np.int32),
            loss_mask=np.ones(length, dtype=bool),
            behavior_logprobs=np.full(length, -np.log(vocab_size), dtype=np.float32),
            advantages=np.ones(length),
            weight=1.0 / tokens,
        )
        for _ in range(tokens // length)
    ]
    return WeightedGroup(prompt_ids=rng.integers(0, vocab_size, 1).astype(np.int32), rollouts=tuple(rollouts))
