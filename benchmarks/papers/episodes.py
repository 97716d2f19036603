"""A co-located run without a coordinator: the learner samples its own batches, and games have several turns.

Problems, environments, scorer, learner and evaluation are the hub's own. Each turn is sampled with the seed that the
hub would use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.engine import group_request
from benchmarks.learning.virtual_run import Point, score_of
from benchmarks.papers.runs import Case
from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.groups import turn_seed
from echo_hub.evaluation.by_hub import Generated, HeldOut, Ids, Played, evaluate
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer, train_step
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.task_problems import EnvironmentReply
from echo_shared.sampling import torch_sampler
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_draws import draw, most_likely
from echo_shared.sampling.torch_prefix_cache import TorchPrefixCache
from echo_shared.wire.messages import FinishReason

KEPT_TOKENS: Final = 2**17
"""Maximum number of tokens of unfinished episodes whose keys and values are cached. They take half a gigabyte with
`builtin:small`.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    group_id: int
    index: int
    turns: list[Ids] = field(default_factory=list)
    parts: list[tuple[Ids, NDArray[np.float32], bool]] = field(default_factory=list)
    """One entry for each turn and each observation between turns: token ids, their log-probabilities, and True if the
    policy sampled them.
    """
    draws: list[tuple[int, int, int]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    """Reward of each turn except the last one."""
    observed_tokens: int = 0
    truncated: bool = False
    reward: float | None = None

    def says(self, rollout: FinishedRollout, seed: int) -> None:
        self.turns.append(rollout.completion_ids)
        self.parts.append((rollout.completion_ids, rollout.behavior_logprobs, True))
        self.draws.append((seed, self.index, len(rollout.completion_ids)))
        self.truncated |= rollout.finish_reason is FinishReason.LENGTH

    def hears(self, answer: EnvironmentReply) -> None:
        ids = answer.observation_ids
        self.parts.append((ids, np.zeros(len(ids), np.float32), False))
        self.observed_tokens += len(ids)
        self.turn_rewards.append(answer.turn_reward)

    def as_rollout(self) -> TrainingRollout:
        assert self.reward is not None
        return TrainingRollout(
            completion_ids=np.concatenate([ids for ids, _, _ in self.parts]),
            loss_mask=np.concatenate([np.full(len(ids), drawn) for ids, _, drawn in self.parts]),
            behavior_logprobs=np.concatenate([logprobs for _, logprobs, _ in self.parts]),
            reward=self.reward,
            finish_reason=FinishReason.LENGTH if self.truncated else FinishReason.STOP,
            sampling_s=0.0,
            draws=np.array(self.draws, np.uint64),
            turn_rewards=np.array(self.turn_rewards, np.float64),
        )


class Play:
    def __init__(self, config: HubConfig) -> None:
        base_dir = resolve_base(config.model.base)
        codec = PromptCodec.of_run(config, base_dir)
        self.config = config
        self.problems = Problems.of_run(config, codec)
        self.settings = LearnerSettings.of_run(config, base_dir=Path(base_dir), stop_ids=codec.stop_ids)
        self.policy = Policy.load(self.settings)

    def groups(self, step: int) -> list[TrainingGroup]:
        """Sample the batch of a step with the current policy. The first step is 0."""
        training = self.config.training
        group_ids = range(step * training.groups_per_step, (step + 1) * training.groups_per_step)
        episodes = [Episode(group_id=group, index=index) for group in group_ids for index in range(training.group_size)]
        playing, turn, prefixes = episodes, 0, TorchPrefixCache(KEPT_TOKENS)
        with self.policy.holding(self.policy.published()):
            while playing:
                self._turn(playing, turn, prefixes)
                playing, turn = [one for one in playing if one.reward is None], turn + 1
        return [
            TrainingGroup(
                prompt_ids=self.problems.prompt_ids(group),
                rollouts=tuple(one.as_rollout() for one in episodes if one.group_id == group),
            )
            for group in group_ids
        ]

    def _turn(self, playing: Sequence[Episode], turn: int, prefixes: TorchPrefixCache) -> None:
        by_place = {(one.group_id, one.index): one for one in playing}
        requests = [self._request(one, turn) for one in playing] if turn else self._first_requests(playing)
        for rollout in torch_sampler.sample_groups(self.policy.model, requests, prefixes=prefixes):
            episode = by_place[rollout.group_id, rollout.index]
            episode.says(rollout, turn_seed(self.problems.seed(rollout.group_id), turn))
            answer = self.problems.respond(episode.group_id, episode.turns, episode.observed_tokens)
            if isinstance(answer, EnvironmentReply):
                episode.hears(answer)
            else:
                episode.reward = score_of(answer)

    def _first_requests(self, playing: Sequence[Episode]) -> list[GroupRequest]:
        indices: dict[int, list[int]] = {}
        for one in playing:
            indices.setdefault(one.group_id, []).append(one.index)
        return [
            self._asked(group, tuple(of_group), self.problems.prompt_ids(group), 0)
            for group, of_group in indices.items()
        ]

    def _request(self, episode: Episode, turn: int) -> GroupRequest:
        said = [ids for ids, _, _ in episode.parts]
        prompt = np.concatenate([self.problems.prompt_ids(episode.group_id), *said])
        return self._asked(episode.group_id, (episode.index,), prompt, turn)

    def _asked(self, group_id: int, indices: tuple[int, ...], prompt: Ids, turn: int) -> GroupRequest:
        return group_request(
            group_id,
            prompt,
            indices=indices,
            seed=turn_seed(self.problems.seed(group_id), turn),
            temperature=self.config.sampling.temperature,
            max_tokens=self.config.sampling.max_tokens,
            stop_ids=self.settings.stop_ids,
        )

    def accuracy(self) -> float:
        """Return the greedy held-out accuracy, evaluated like a hub's version."""
        (heldout,) = HeldOut.of_run(self.config, self.problems, stop_ids=self.settings.stop_ids)
        prefixes = TorchPrefixCache(KEPT_TOKENS)

        async def generate(requests: Sequence[GroupRequest], *, greedy: bool) -> Generated:
            choose = most_likely if greedy else draw
            drawn = torch_sampler.sample_groups(self.policy.model, requests, choose, prefixes=prefixes)
            return Generated(rollouts=list(drawn), seconds=0)

        async def judge(played: Sequence[Played]) -> Sequence[Any]:
            return [self.problems.heldout_respond(*one) for one in played]

        with self.policy.holding(self.policy.published()):
            measured = asyncio.run(evaluate(0, heldout, generate=generate, judge=judge))
        return measured[0].accuracy


def run_episodes(case: Case, seed: int) -> tuple[list[Point], list[Mapping[str, float]]]:
    """Train a case to its last step. Return the points of its learning curve, and each step's metrics."""
    play = Play(case.config(seed))
    training = play.config.training
    optimizer = make_optimizer(play.policy, training)
    steps: list[Mapping[str, float]] = []
    points = [Point(trained_rollouts=0, reward=None, accuracy=play.accuracy(), staleness=0.0)]
    for step in range(1, training.steps + 1):
        steps.append(train_step(play.policy, optimizer, play.groups(step - 1), play.settings))
        if step % case.evaluate_every == 0 or step == training.steps:
            points.append(
                Point(
                    trained_rollouts=step * training.groups_per_step * training.group_size,
                    reward=steps[-1]["mean_reward"],
                    accuracy=play.accuracy(),
                    staleness=0.0,
                )
            )
    return points, steps
