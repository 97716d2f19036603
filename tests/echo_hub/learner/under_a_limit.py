"""Trains a step normally, then with too little address space; runs in a separate process for `test_within_memory`.

Usage: `python under_a_limit.py BASE_DIR RUN_DIR`; prints a JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import numpy as np
import psutil
import torch

from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.cuts import Cuts
from echo_hub.learner.policy import Policy
from echo_hub.learner.probe import first_cut
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer
from echo_hub.learner.within_memory import step_within_memory
from echo_shared.wire.messages import FinishReason

SPARE_BYTES = 40 * 2**20
LENGTH = 200


def batch(groups: int) -> list[TrainingGroup]:
    rng = np.random.default_rng(0)
    return [
        TrainingGroup(
            prompt_ids=rng.integers(2, 40, 5).astype(np.int32),
            rollouts=tuple(
                TrainingRollout(
                    completion_ids=rng.integers(2, 40, LENGTH).astype(np.int32),
                    loss_mask=np.ones(LENGTH, dtype=bool),
                    behavior_logprobs=rng.normal(-3.0, 0.1, LENGTH).astype(np.float32),
                    reward=float(reward),
                    finish_reason=FinishReason.STOP,
                    sampling_s=0.0,
                )
                for reward in rng.random(4)
            ),
        )
        for _ in range(groups)
    ]


def main() -> None:
    base_dir, run_dir = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    settings = LearnerSettings(
        base_dir=base_dir,
        seed=3,
        temperature=1.0,
        max_tokens=LENGTH,
        stop_ids=(1,),
        training=TrainingConfig(lora_rank=4, lora_alpha=8, learning_rate=1e-3),
        learner=LearnerConfig(device="cpu", threads=1),
    )
    found = []
    for limited in (False, True):
        policy = Policy.load(settings)
        optimizer = make_optimizer(policy, settings.training)
        cuts = Cuts(run_dir / "checkpoints", place="here")
        cuts.put(1, first_cut(policy, settings))
        before = weights(policy)
        if limited:
            spare = psutil.Process().memory_info().vms + SPARE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (spare, resource.RLIM_INFINITY))
        outcome = step_within_memory(policy, optimizer, batch(16), settings, cuts=cuts)
        if limited:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found.append((weights(policy), outcome.metrics))
    (whole, _), (halves, metrics) = found
    said = {name: metrics[name] for name in ("out_of_memory", "fitted_tokens")}
    difference, moved = float((whole - halves).abs().max()), float((whole - before).abs().max())
    print(json.dumps({**said, "difference": difference, "moved": moved}))


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in policy.parameters.values()])


if __name__ == "__main__":
    main()
