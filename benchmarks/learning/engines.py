"""Samplers of a virtual run: the learner's own policy, or a node's engine of any kind, in this process."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from echo_hub.learner.policy import Policy
from echo_node.backends.base import EngineSettings, PreparedPolicy
from echo_node.backends.registry import make_engine
from echo_shared import torch_sampler
from echo_shared.sampling import FinishedRollout, GroupRequest

Draw = Callable[[Policy, Mapping[str, Tensor], Sequence[GroupRequest]], Iterable[FinishedRollout]]
"""Draws all rollouts of the requests with these weights of the policy's adapter."""


def by_policy(policy: Policy, weights: Mapping[str, Tensor], requests: Sequence[GroupRequest]) -> list[FinishedRollout]:
    """Draw in float32 with the learner's own model."""
    with policy.holding(weights):
        return list(torch_sampler.sample_groups(policy.model, requests))


class NodeEngine:
    """Draws with a node's real engine: real precision, real kernels."""

    def __init__(self, backend: str, precision: str, *, base_dir: Path, scratch: Path, width: int = 64) -> None:
        """Open the engine. `scratch` keeps the base model in the engine's own format. Raises BackendError."""
        self._scratch = scratch
        self._engine = make_engine(backend)
        self._engine.open(base_dir, scratch, EngineSettings(width=width, threads=1, precision=precision))
        self._set: PreparedPolicy | None = None

    def __call__(
        self, policy: Policy, weights: Mapping[str, Tensor], requests: Sequence[GroupRequest]
    ) -> list[FinishedRollout]:
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            policy.save_adapter(Path(directory), weights)
            prepared = self._engine.prepare(Path(directory))
        self._engine.set_policy(prepared)
        if self._set is not None:
            self._set.free()
        self._set = prepared
        events = list(itertools.chain.from_iterable(self._engine.sample(iter(requests))))
        rollouts = [event for event in events if isinstance(event, FinishedRollout)]
        if len(rollouts) != sum(len(request.indices) for request in requests):
            raise RuntimeError(f"some groups could not be drawn: {events}")
        return rollouts

    def close(self) -> None:
        self._engine.close()
