"""The processes (ranks) of one learner. They use PyTorch's distributed package, and FSDP2 to shard the base model.

Rank 0 talks to the hub and forwards its commands to the other ranks. The frozen base is sharded by layer. The small
adapter is whole at every rank: a step's gradients are summed once, before the optimizer, and every rank takes the same
optimizer step. The loss is a sum of weighted token losses over the whole step, so gradients are summed, not averaged.

A learner of one process uses the same class, `TrainingRanks()`. Its methods then communicate nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.frames import pack_error, unpack_error
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_shared.errors import EchoError, LearnerError
from echo_shared.process.child import HEADER_BYTES, Frame, pack_frame, unpack_frame

SILENCE: Final = timedelta(minutes=30)
"""Longest wait for another rank. If a rank's process ends, the others notice it within a second; this limit is for a
host that vanishes silently. The limit must exceed the longest time that any rank samples, because the other ranks wait
for that rank."""

T = TypeVar("T")


class TrainingRanks:
    """The ranks (processes) of a learner, as seen from this process. In a process started by `echo_hub.learner.launch`,
    create it with `join`.
    """

    def __init__(self, *, rank: int = 0, count: int = 1, base_dir: Path | None = None) -> None:
        self.rank = rank
        self.count = count
        self._base_dir = base_dir

    @classmethod
    def join(cls, *, base_dir: Path | None) -> TrainingRanks:
        """Join the other ranks. `base_dir` is the base model on this host; None on the hub's host."""
        cuda = torch.cuda.is_available()
        distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=SILENCE)
        return cls(rank=distributed.get_rank(), count=distributed.get_world_size(), base_dir=base_dir)

    def leave(self) -> None:
        """Leave the process group. Every rank must call it at the end."""
        if self.count > 1:
            distributed.destroy_process_group()

    def place(self, settings: LearnerSettings) -> LearnerSettings:
        """Return the settings adapted to this process: its own GPU, its share of processor cores, and its host's
        directory of the base model.

        Raises LearnerError if there is no GPU for it.
        """
        if self.count == 1:
            return settings
        local_rank = int(os.environ["LOCAL_RANK"])
        learner: dict[str, Any] = {}
        if settings.learner.device != "cpu" and (gpus := torch.cuda.device_count()):
            if local_rank >= gpus:
                raise LearnerError(
                    "There are more learner processes on a host than it has GPUs.",
                    got=f"learner.processes = {settings.learner.processes}, {gpus} GPUs",
                    do=f"Set learner.processes to {gpus}, or learner.device to cpu.",
                )
            learner["device"] = f"cuda:{local_rank}"
            torch.cuda.set_device(local_rank)
        if not settings.learner.threads:
            learner["threads"] = max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"]))
        return settings.model_copy(
            update={
                "learner": settings.learner.model_copy(update=learner),
                "base_dir": self._base_dir or settings.base_dir,
            }
        )

    def tell(self, frame: Frame | None = None, *, by: int = 0) -> Frame:
        """Broadcast rank `by`'s frame, and return the frame at every rank. Other ranks pass None."""
        if self.count == 1:
            assert frame is not None
            return frame
        body = b"" if frame is None else pack_frame(frame)
        size = torch.tensor([len(body)])
        distributed.broadcast(size, by)
        data = _bytes(body) if body else torch.empty(int(size), dtype=torch.uint8)
        distributed.broadcast(data, by)
        return _frame(data) if frame is None else frame

    def tell_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send rank 0's tensors to all ranks, and return them in host memory at each of them. Other ranks' tensors are
        ignored.
        """
        if self.count == 1:
            return dict(tensors)
        names = self.tell({"names": list(tensors)} if self.rank == 0 else None)["names"]
        told = {}
        for name in names:  # Send tensors one by one: together they may exceed the size limit of a frame.
            frame = self.tell({"tensor": tensors[name].numpy(force=True)} if self.rank == 0 else None)
            told[name] = torch.from_numpy(frame["tensor"].copy())
        return told

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """If the code inside the `with` block fails at any rank (process of the learner), raise the first failing
        rank's EchoError at every rank.
        """
        if self.count == 1:
            yield
            return
        problem: Frame = {}
        try:
            yield
        except EchoError as error:
            problem = pack_error(error)
        for first in filter(None, self.exchange(problem)):
            raise unpack_error(first)

    def exchange(self, frame: Frame) -> list[Frame]:
        """Return every rank's frame, in rank order, at every rank."""
        return [self.tell(frame if rank == self.rank else None, by=rank) for rank in range(self.count)]

    def gather(self, frame: Frame) -> list[Frame]:
        """Return every rank's frame, in rank order, at rank 0; an empty list at the other ranks."""
        if self.rank:
            body = _bytes(pack_frame(frame))
            distributed.send(torch.tensor([len(body)]), 0)
            distributed.send(body, 0)
            return []
        frames = [frame]
        for rank in range(1, self.count):
            size = torch.zeros(1, dtype=torch.int64)
            distributed.recv(size, rank)
            data = torch.empty(int(size), dtype=torch.uint8)
            distributed.recv(data, rank)
            frames.append(_frame(data))
        return frames

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's part of `items`: one in `count` of them (the number of ranks), beginning at position
        `rank`. `items` must be equal at all ranks.
        """
        return items[self.rank :: self.count]

    def micro_batches(self, groups: Sequence[WeightedGroup], *, micro_batch_tokens: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of `groups`. All ranks get the same number, because they compute each layer
        together.

        The i-th micro-batches of all ranks have similar sizes. Micro-batches are smaller than `micro_batch_tokens` if
        ranks would be idle otherwise. Ranks that still lack one get a micro-batch without trained tokens.
        """
        batches = build_micro_batches(groups, micro_batch_tokens=self.budget(groups, micro_batch_tokens))
        if self.count == 1:
            return batches
        batches.sort(key=lambda batch: len(batch.input_ids_T), reverse=True)
        batches += build_micro_batches([_NOTHING], micro_batch_tokens=1) * (-len(batches) % self.count)
        return list(self.share(batches))

    def budget(self, groups: Sequence[WeightedGroup], micro_batch_tokens: int) -> int:
        """Return `micro_batch_tokens`, or fewer if so large micro-batches would leave ranks idle."""
        if self.count == 1:
            return micro_batch_tokens
        tokens = sum(
            len(group.prompt_ids) + len(rollout.completion_ids) for group in groups for rollout in group.rollouts
        )
        return min(micro_batch_tokens, -(-tokens // self.count))

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sum each tensor over all ranks, in place. All tensors have one dtype and device."""
        if self.count == 1:
            return
        own = list(tensors)
        if own:
            flat = torch.cat([tensor.flatten() for tensor in own])
            distributed.all_reduce(flat)
            for tensor, total in zip(own, flat.split([tensor.numel() for tensor in own]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def collect(self, rows: Tensor) -> Tensor:
        """Return all ranks' rows [R, ...], concatenated in rank order, at every rank.

        Every rank must pass the same number of rows.
        """
        if self.count == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.count)]
        distributed.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def shard(self, model: Any, device_type: str) -> None:
        """Shard the base's layers over the ranks' devices. Each layer is gathered at every rank while it computes.
        Embeddings, output layer and adapter stay whole.
        """
        if self.count == 1:
            return
        body = model.get_base_model().base_model
        layers = [module for module in body.modules() if isinstance(module, GradientCheckpointingLayer)]
        adapter = {parameter for parameter in model.parameters() if parameter.requires_grad}
        spread = {parameter for layer in layers for parameter in layer.parameters()} - adapter
        mesh = init_device_mesh(device_type, (self.count,))
        for layer in layers:
            fully_shard(layer, mesh=mesh, ignored_params=adapter)
        # Apart from the layers, the model's body has no sharded parameters. Wrapping the body lets FSDP prefetch the
        # next layer while one computes.
        fully_shard(body, mesh=mesh, ignored_params=set(model.parameters()) - spread)

    @contextmanager
    def whole(self, model: torch.nn.Module) -> Iterator[None]:
        """Within the `with` block, hold the whole base model at every rank, so that each rank can compute
        independently.
        """
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in sharded:
                module.reshard()
                module.set_reshard_after_forward(True, recurse=False)


def _bytes(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _frame(packed: Tensor) -> Frame:
    return unpack_frame(packed.numpy().tobytes()[HEADER_BYTES:])


_NOTHING: Final = WeightedGroup(
    prompt_ids=np.zeros(1, dtype=np.int32),
    rollouts=(
        WeightedRollout(
            completion_ids=np.zeros(1, dtype=np.int32),
            loss_mask=np.zeros(1, dtype=bool),
            behavior_logprobs=np.zeros(1, dtype=np.float32),
            advantages=np.zeros(0),
            weight=0.0,
        ),
    ),
)
"""A group without drawn tokens: it passes through the model, but adds nothing to the gradient."""

ALONE: Final = TrainingRanks()
