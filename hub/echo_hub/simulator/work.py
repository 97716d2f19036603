"""The content of simulated work: what is sampled, its reward, and the effect of training.

`World` decides when things happen; a `SimulatedWork` decides what is sampled and which rewards it gets. The default is
`MadeUp`: meaningless tokens and rewards that differ within a group. Another `SimulatedWork` may sample from a model and
train it, in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.accounting.effects import RolloutReceived, RolloutsDropped, ScoreRecorded, SendLease, StepPlanned
from echo_hub.core.accounting.events import GroupPrepared
from echo_hub.simulator.node import Sampling
from echo_hub.simulator.scenario import Scenario
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import FinishReason

Record = RolloutReceived | RolloutsDropped | ScoreRecorded | StepPlanned


class SimulatedWork(Protocol):
    def prepare(self, group_id: int) -> GroupPrepared:
        """Return the group's problem."""

    def lease(self, lease: SendLease) -> None:
        """Take note that the hub leases this work to a node."""

    def lengths(self, lease: SendLease) -> Mapping[int, int] | None:
        """Return the number of tokens of each rollout, by index; None: the scenario's lengths apply."""

    def draw(self, sampling: Sampling) -> RolloutPayload:
        """Return the payload of a finished rollout; its `sampling_s` is the time that the node took."""

    def record(self, record: Record) -> None:
        """Take note of a record that the hub's store would keep."""

    def score(self, rollout_id: str) -> float:
        """Return the reward of a received rollout, in place of the task's scorer."""

    def train(self, step: int) -> Mapping[str, float]:
        """Finish a training step and return its metrics."""

    def publish(self, policy_version: int) -> None:
        """Publish the learner's present weights as this version."""


class MadeUp:
    """Work without content: all tokens are 0, and rewards differ only by index."""

    def __init__(self, scenario: Scenario) -> None:
        self._lengths = scenario.lengths
        self._ids: dict[int, NDArray[np.int32]] = {}

    def prepare(self, group_id: int) -> GroupPrepared:
        return GroupPrepared(
            group_id=group_id,
            seed=group_id,
            prompt=group_id % self._lengths.prompts,
            prompt_tokens=round(self._lengths.prompt_tokens),
        )

    def lease(self, lease: SendLease) -> None:
        pass

    def lengths(self, lease: SendLease) -> None:
        """Return None: the scenario's lengths apply."""

    def draw(self, sampling: Sampling) -> RolloutPayload:
        """Return a payload; all completions of the same length share one array."""
        ids = self._ids.get(sampling.tokens)
        if ids is None:
            ids = self._ids[sampling.tokens] = np.zeros(sampling.tokens, np.int32)
        return RolloutPayload(
            completion_ids=ids,
            behavior_logprobs=ids.view(np.float32),
            finish_reason=FinishReason.STOP,
            sampling_s=sampling.ends_at - sampling.began_at,
        )

    def record(self, record: Record) -> None:
        pass

    def score(self, rollout_id: str) -> float:
        """Derive the reward from the index, so that rewards within a group differ."""
        return float(int(rollout_id[-1]) % 2)

    def train(self, step: int) -> Mapping[str, float]:
        return {}

    def publish(self, policy_version: int) -> None:
        pass
