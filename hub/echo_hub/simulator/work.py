"""What a simulated run does besides taking time: what is drawn, what it is worth, what the learner makes of it.

The world says when; a `Work` says what. By itself a run is of `MadeUp` work: tokens without meaning, rewards that
differ within a group. Another one may draw from a model and train it, in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.effects import RolloutReceived, RolloutsDropped, ScoreRecorded, SendLease, StepPlanned
from echo_hub.core.events import GroupPrepared
from echo_hub.simulator.node import Sampling
from echo_hub.simulator.scenario import Scenario
from echo_shared.messages import FinishReason
from echo_shared.rollout_books import RolloutPayload

Record = RolloutReceived | RolloutsDropped | ScoreRecorded | StepPlanned


class Work(Protocol):
    def prepare(self, group_id: int) -> GroupPrepared:
        """The group's problem."""

    def lease(self, lease: SendLease) -> None:
        """The hub gives this work to a node."""

    def lengths(self, lease: SendLease) -> Mapping[int, int] | None:
        """The tokens of each of its rollouts, by index; None: the scenario says how long they are."""

    def draw(self, sampling: Sampling) -> RolloutPayload:
        """What a node sends, which has drawn it: `sampling_s` is the node's."""

    def record(self, record: Record) -> None:
        """What the hub's store would keep."""

    def score(self, rollout_id: str) -> float:
        """The reward of what was received."""

    def train(self, step: int) -> Mapping[str, float]:
        """The learner ends this step: its metrics."""

    def publish(self, policy_version: int) -> None:
        """The learner's weights become this version."""


class MadeUp:
    """Work without content."""

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
        """The scenario's."""

    def draw(self, sampling: Sampling) -> RolloutPayload:
        """One array serves all completions of a length."""
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
        """By the index: rewards of one group differ."""
        return float(int(rollout_id[-1]) % 2)

    def train(self, step: int) -> Mapping[str, float]:
        return {}

    def publish(self, policy_version: int) -> None:
        pass
