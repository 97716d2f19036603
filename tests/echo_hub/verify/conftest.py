"""Versions of a random base model that computes in milliseconds, and rollouts sampled with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.run.directory import RunDirectory
from echo_hub.verify.drawn import DrawnRollout
from echo_shared.records.rollout import DrawnSpan
from echo_shared.sampling.interface import FinishedRollout, GroupRequest, Prefix
from echo_shared.sampling.torch_sampler import sample_groups
from tests.echo_hub.learner.conftest import _one_thread, base_dir

__all__ = ["_one_thread", "base_dir"]

VERSIONS = 3
MAX_TOKENS = 12
STOP_ID = 1


def adapters_in(directory: RunDirectory) -> dict[int, Path]:
    """Return the adapters' directories of the first versions. The directories need not exist."""
    return {version: directory.adapter(version) for version in range(1, 12)}


@dataclass(frozen=True, slots=True)
class Versions:
    """A run directory with adapters of versions 1 to `VERSIONS`, and a policy that samples with them."""

    directory: RunDirectory
    settings: LearnerSettings
    policy: Policy

    @property
    def adapters(self) -> dict[int, Path]:
        return adapters_in(self.directory)

    def request(self, number: int, *, size: int = 4, prefixes: Sequence[Prefix] = ()) -> GroupRequest:
        rng = np.random.default_rng(number)
        return GroupRequest(
            lease_id=number,
            group_id=number,
            indices=tuple(prefix.index for prefix in prefixes) or tuple(range(size)),
            prompt_ids=rng.integers(2, 40, 3 + number % 4).astype(np.int32),
            seed=1_000 + number,
            policy_version=0,
            temperature=self.settings.temperature,
            max_tokens=MAX_TOKENS,
            stop_ids=(STOP_ID,),
            prefixes=tuple(prefixes),
        )

    def draw(self, version: int, requests: Sequence[GroupRequest]) -> list[FinishedRollout]:
        held = self.policy.read_adapter(self.directory.adapter(version)) if version else None
        if held is None:
            with self.policy.model.disable_adapter():
                return list(sample_groups(self.policy.model, requests))
        with self.policy.holding(held):
            return list(sample_groups(self.policy.model, requests))

    def drawn(self, version: int, *numbers: int, node_id: str = "a") -> list[DrawnRollout]:
        """Return all rollouts of these groups, sampled by one node with one version."""
        requests = {number: self.request(number) for number in numbers}
        return [
            as_drawn(
                rollout, requests[rollout.group_id], DrawnSpan(node_id=node_id, policy_version=version, num_tokens=0)
            )
            for rollout in self.draw(version, list(requests.values()))
        ]


def as_drawn(rollout: FinishedRollout, request: GroupRequest, *spans: DrawnSpan) -> DrawnRollout:
    """Return the rollout as if each of `spans` (node, version, number of tokens) had sampled that many of its tokens,
    in order; the last one gets all remaining tokens.
    """
    *first, last = spans
    left = len(rollout.completion_ids) - sum(span.num_tokens for span in first)
    return DrawnRollout(
        rollout_id=f"{rollout.lease_id}-{rollout.index}",
        prompt_ids=request.prompt_ids,
        **rollout.content(),
        spans=(*first, DrawnSpan(node_id=last.node_id, policy_version=last.policy_version, num_tokens=left)),
        seed=request.seed,
        index=rollout.index,
    )


@pytest.fixture(scope="session")
def versions(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    settings = LearnerSettings(
        base_dir=base_dir,
        seed=3,
        temperature=0.8,
        max_tokens=MAX_TOKENS,
        stop_ids=(STOP_ID,),
        training=TrainingConfig(lora_rank=4, lora_alpha=8),
        learner=LearnerConfig(device="cpu", threads=1, micro_batch_tokens=64),
    )
    policy = Policy.load(settings)
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    for version in range(1, VERSIONS + 1):
        generator = torch.Generator().manual_seed(version)
        weights = {
            name: torch.randn(parameter.shape, generator=generator) * 0.1
            for name, parameter in policy.parameters.items()
        }
        directory.adapter(version).mkdir(parents=True)
        policy.save_adapter(directory.adapter(version), weights)
    return Versions(directory, settings, policy)
