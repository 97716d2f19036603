"""Two real processes connected by gloo must train like one process; see `two_ranks.py`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echo_hub.learner import frames
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_shared.process.child import pack_frame

MakeGroups = Callable[[int], list[TrainingGroup]]


@pytest.mark.slow
def test_two_processes_train_as_one_does(
    make_settings: Callable[..., LearnerSettings], make_groups: MakeGroups, tmp_path: Path
) -> None:
    def case(steps: list[list[TrainingGroup]], **sections: dict[str, object]) -> dict[str, object]:
        settings = make_settings(**sections).model_dump(mode="json")
        return {"settings": settings, "steps": [frames.pack_groups(groups) for groups in steps]}

    def forged(groups: list[TrainingGroup]) -> list[TrainingGroup]:
        """Claim probabilities that no honest engine reports, for the best rollouts of groups 0 and 2."""

        def claimed(group: TrainingGroup) -> TrainingGroup:
            best = max(group.rollouts, key=lambda rollout: rollout.reward)
            claims = replace(best, behavior_logprobs=np.full_like(best.behavior_logprobs, -60))
            return replace(group, rollouts=tuple(claims if one is best else one for one in group.rollouts))

        return [claimed(group) if number in (0, 2) else group for number, group in enumerate(groups)]

    steps = [make_groups(step) for step in range(2)]
    equal = [replace(g, rollouts=tuple(replace(r, reward=1.0) for r in g.rollouts)) for g in steps[0]]
    shuffled = {
        "training": {"updates_per_step": 2},
        "objective": {"selection": "shuffle_r1", "shuffle_batches": 4},
        "learner": {"micro_batch_tokens": 64},
    }
    cases = {
        "plain": case(steps),
        "uneven": case(steps, learner={"micro_batch_tokens": 72}),
        "several updates": case(
            steps,
            training={"updates_per_step": 2, "lora_targets": "mlp", "rslora": True},
            objective={"name": "decoupled_ppo", "kl_coefficient": 0.1},
            learner={"micro_batch_tokens": 64, "gradient_checkpointing": True},
        ),
        "by sequence": case(steps, training={"lora_targets": "attention"}, objective={"name": "gspo"}),
        # A group is divided among ranks, so only one rank has the forged rollout.
        "left out": case([forged(groups) for groups in steps], learner={"micro_batch_tokens": 64}),
        "sub-batches over updates": case(steps, **shuffled),
        "left out, of sub-batches over updates": case([forged(groups) for groups in steps], **shuffled),
        # The entropy coefficient has an effect from the second step on.
        "entropy": case(
            steps,
            objective={"entropy_coefficient": 0.05, "entropy_target": 5.0},
            learner={"micro_batch_tokens": 64},
        ),
        "without advantage": case([equal, steps[1]]),
    }
    (tmp_path / "cases").write_bytes(pack_frame(cases))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(Path(__file__).with_name("two_ranks.py")), str(tmp_path / "cases")]
    running = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
