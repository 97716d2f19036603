"""A quick step trains nothing, and tells of the batch that it was given."""

from __future__ import annotations

import numpy as np

from benchmarks.ingest.quick_learner import untrained_step
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer
from echo_hub.run.base_model import resolve_base


def test_a_step_changes_nothing_and_has_the_mean_reward() -> None:
    settings = LearnerSettings(
        base_dir=resolve_base("builtin:tiny"),
        seed=3,
        temperature=1.0,
        max_tokens=3,
        stop_ids=(1,),
        training=TrainingConfig(lora_rank=2),
        learner=LearnerConfig(threads=1, device="cpu"),
    )
    policy = Policy.load(settings)
    optimizer = make_optimizer(policy, settings.training)
    group = TrainingGroup(prompt_ids=np.array([3, 4], np.int32), rollouts=tuple(map(rollout, (0.0, 0.5))))
    outcome = untrained_step(policy, optimizer, [group], settings, learner_version=4)
    assert outcome.metrics["mean_reward"] == 0.25
    assert not optimizer.state
    assert outcome.screen["left_out"] == outcome.screen["suspects"] == []


def rollout(reward: float) -> TrainingRollout:
    return TrainingRollout(
        completion_ids=np.array([5, 6, 1], np.int32),
        loss_mask=np.ones(3, dtype=bool),
        behavior_logprobs=np.array([-1.0, -1.0, -1.0], np.float32),
        reward=reward,
        truncated=False,
    )
