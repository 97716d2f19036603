"""A training step slowed to a given duration computes the same result as the real step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.capacity import paced_learner
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner import step
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.run.base_model import resolve_base
from echo_shared.records.step_figures import TRAIN_S
from echo_shared.wire.messages import FinishReason


def test_a_step_takes_the_given_time_and_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv(paced_learner.STEP_S, "1.5")
    settings = LearnerSettings(
        base_dir=resolve_base("builtin:tiny"),
        seed=3,
        temperature=1.0,
        max_tokens=3,
        stop_ids=(1,),
        training=TrainingConfig(lora_rank=2),
        learner=LearnerConfig(threads=1, device="cpu"),
    )
    rollouts = tuple(_rollout(reward) for reward in (0.0, 1.0))
    groups = [TrainingGroup(prompt_ids=np.array([3, 4], np.int32), rollouts=rollouts)]
    found = []
    for train in (step.screened_step, paced_learner.paced_step):
        policy = Policy.load(settings)
        found.append(train(policy, step.make_optimizer(policy, settings.training), groups, settings, learner_version=4))
    real, paced = found
    assert paced.metrics.pop(TRAIN_S.key) >= 1.5
    assert real.metrics.pop(TRAIN_S.key) > 0
    assert paced == real


def _rollout(reward: float) -> TrainingRollout:
    return TrainingRollout(
        completion_ids=np.array([5, 6, 1], np.int32),
        loss_mask=np.ones(3, dtype=bool),
        behavior_logprobs=np.array([-1.0, -1.0, -1.0], np.float32),
        reward=reward,
        finish_reason=FinishReason.STOP,
        sampling_s=0.0,
    )
