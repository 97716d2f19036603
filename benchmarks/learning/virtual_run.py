"""One run without network or clock: the hub's own coordinator, problems, sampler and learner, called in turn.

Nodes are as fast as can be: every lease is sampled the moment it is given, by the version that it names, before the
learner goes on. So a run with staleness bound S trains, from step S + 1 on, on rollouts that are exactly S steps old:
the worst that the bound allows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final, assert_never

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.learning.cases import Case
from echo_hub.config.sections import HubConfig
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.effects import (
    AnnounceVersion,
    CostAccrued,
    Effect,
    EvaluationDone,
    FinishRun,
    GroupDropped,
    GroupOpened,
    LookUpReceipt,
    PrepareGroup,
    PublishVersion,
    RevokeLease,
    RolloutReceived,
    RolloutsDropped,
    RolloutsEvaluated,
    RolloutsLeased,
    ScoreRecorded,
    ScoreRollout,
    SendLease,
    SendReceipts,
    SendTrained,
    StepPlanned,
    StepTrained,
    TellStandby,
    TrainStep,
    VersionRecorded,
)
from echo_hub.core.events import (
    Event,
    GroupPrepared,
    LearnerReady,
    NodeConnected,
    NodeReported,
    RolloutScored,
    StepDone,
    VersionPublished,
)
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.payload import RolloutPayload
from echo_hub.core.snapshot import CoordinatorSnapshot
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer, train_step
from echo_hub.opening import coordinator_settings
from echo_hub.run.base_model import PromptCodec, resolve_base
from echo_hub.scoring.problems import Problems
from echo_hub.trainer import arrived
from echo_shared import torch_sampler
from echo_shared.messages import FinishReason, rollout_id
from echo_shared.sampling import GroupRequest

EVALUATE_EVERY: Final = 10
"""Steps between two points of the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where a run stands after `trained_rollouts`."""

    trained_rollouts: int
    reward: float | None
    """Mean of the newest step's rollouts; None before the first step."""
    accuracy: float
    """Greedy, held out."""
    staleness: float
    """Mean of the newest step's groups."""


def run(case: Case, seed: int) -> list[Point]:
    """The curve of one run, from its start to its last step."""
    torch.set_num_threads(1)
    disable_progress_bar()
    return _Run(case.config(seed)).points()


class _Run:
    def __init__(self, config: HubConfig) -> None:
        base_dir = resolve_base(config.model.base)
        codec = PromptCodec.load(base_dir)
        self._config = config
        self._problems = Problems.of_run(config, codec)
        self._settings = LearnerSettings.of_run(config, base_dir=Path(base_dir), stop_ids=codec.stop_ids)
        self._policy = Policy.load(self._settings)
        self._optimizer = make_optimizer(self._policy, config.training)
        self._coordinator = Coordinator(coordinator_settings(config, multi_turn=False), CoordinatorSnapshot())
        self._node_id = HUB_NODE_ID if config.run.mode == "colocated" else "node"
        self._events: deque[Event] = deque()
        self._leases: list[SendLease] = []
        self._steps: deque[int] = deque()
        """Those that the learner was given, in order."""
        self._received: dict[str, RolloutPayload] = {}
        self._rewards: dict[str, float] = {}
        self._group_of: dict[str, int] = {}
        self._trained = 0
        self._planned: dict[int, StepPlanned] = {}
        self._points: list[Point] = []
        self._finished = False

    def points(self) -> list[Point]:
        self._note(reward=None, staleness=0.0)
        self._carry_out(self._coordinator.start(0.0))
        self._events += [NodeConnected(node_id=self._node_id), LearnerReady(policy_version=0)]
        self._report_capacity(0)
        while not self._finished:
            self._turn()
        return self._points

    def _turn(self) -> None:
        """What has happened first, then sampling, and the learner's step only when there is nothing left to sample."""
        if self._events:
            self._carry_out(self._coordinator.handle(self._events.popleft(), 0.0))
        elif self._leases:
            self._sample()
        else:
            assert self._steps, "somebody always has work until the run is finished"
            self._train(self._steps.popleft())

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case RolloutReceived():
                    self._received[effect.rollout_id] = effect.payload
                case ScoreRecorded():
                    assert effect.reward is not None, "the task has one turn"
                    self._rewards[effect.rollout_id] = effect.reward
                case StepPlanned():
                    self._planned[effect.step] = effect
                case PrepareGroup():
                    seed = self._problems.seed(effect.group_id)
                    self._events.append(GroupPrepared(group_id=effect.group_id, seed=seed))
                case SendLease():
                    self._leases.append(effect)
                case ScoreRollout():
                    self._score(effect.rollout_id)
                case TrainStep():
                    self._steps.append(effect.step)
                case PublishVersion():
                    self._events.append(VersionPublished(policy_version=effect.policy_version))
                    self._report_capacity(effect.policy_version)
                case FinishRun():
                    self._finished = True
                case (
                    AnnounceVersion()
                    | EvaluationDone()
                    | GroupDropped()
                    | CostAccrued()
                    | GroupOpened()
                    | LookUpReceipt()
                    | RevokeLease()
                    | RolloutsDropped()
                    | RolloutsEvaluated()
                    | RolloutsLeased()
                    | SendReceipts()
                    | SendTrained()
                    | StepTrained()
                    | TellStandby()
                    | VersionRecorded()
                ):
                    pass  # There are no nodes to tell, and no books to keep.
                case _:
                    assert_never(effect)

    def _report_capacity(self, policy_version: int) -> None:
        training = self._config.training
        capacity = (training.max_staleness + 1) * training.groups_per_step * training.group_size
        self._events.append(NodeReported(node_id=self._node_id, capacity=capacity, policy_version=policy_version))

    def _sample(self) -> None:
        """All leases at once; the learner holds the version that they name, for it trains only when none is left."""
        leases, self._leases = self._leases, []
        sampling = self._config.sampling
        requests = [
            GroupRequest(
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                indices=lease.indices,
                prompt_ids=self._problems.prompt_ids(lease.group_id),
                seed=lease.seed,
                policy_version=lease.policy_version,
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                stop_ids=self._settings.stop_ids,
            )
            for lease in leases
        ]
        with self._policy.holding(self._policy.published()):
            for rollout in torch_sampler.sample_groups(self._policy.model, requests):
                name = rollout_id(rollout.lease_id, rollout.index)
                self._group_of[name] = rollout.group_id
                self._events.append(arrived(rollout, node_id=self._node_id))

    def _score(self, name: str) -> None:
        reward = float(self._problems.respond(self._group_of[name], [self._received[name].completion_ids]))
        self._events.append(RolloutScored(rollout_id=name, reward=reward))

    def _train(self, step: int) -> None:
        planned = self._planned.pop(step)
        metrics = train_step(self._policy, self._optimizer, self._batch(planned), self._settings)
        self._trained += len(planned.rollout_ids)
        if step % EVALUATE_EVERY == 0 or step == self._config.training.steps:
            self._note(reward=metrics["mean_reward"], staleness=float(np.mean(planned.staleness)))
        self._events.append(StepDone(step=step, metrics=metrics))

    def _batch(self, planned: StepPlanned) -> list[TrainingGroup]:
        rollouts: dict[int, list[TrainingRollout]] = {group_id: [] for group_id in planned.group_ids}
        for name in planned.rollout_ids:
            payload = self._received.pop(name)
            rollouts[self._group_of.pop(name)].append(
                TrainingRollout(
                    completion_ids=payload.completion_ids,
                    loss_mask=np.ones(len(payload.completion_ids), dtype=bool),
                    behavior_logprobs=payload.behavior_logprobs,
                    reward=self._rewards.pop(name),
                    truncated=payload.finish_reason is FinishReason.LENGTH,
                )
            )
        return [
            TrainingGroup(prompt_ids=self._problems.prompt_ids(group_id), rollouts=tuple(of_group))
            for group_id, of_group in rollouts.items()
        ]

    def _note(self, *, reward: float | None, staleness: float) -> None:
        with self._policy.holding(self._policy.published()):
            completions = torch_sampler.greedy(
                self._policy.model,
                self._problems.heldout_prompt_ids(),
                max_tokens=self._settings.max_tokens,
                stop_ids=self._settings.stop_ids,
            )
        rewards = [float(self._problems.heldout_respond(number, [ids])) for number, ids in enumerate(completions)]
        accuracy = sum(map(self._problems.rewards.is_solved, rewards)) / len(rewards)
        self._points.append(
            Point(trained_rollouts=self._trained, reward=reward, accuracy=accuracy, staleness=staleness)
        )
