from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.learning import cases
from benchmarks.learning.virtual_run import Learning, NodeEngine, by_policy
from echo_shared.sampling.interface import FinishedRollout, GroupRequest


def in_order(rollouts: Iterable[FinishedRollout]) -> list[FinishedRollout]:
    return sorted(rollouts, key=lambda rollout: rollout.index)


def tokens(rollouts: list[FinishedRollout]) -> dict[int, list[int]]:
    return {rollout.index: rollout.completion_ids.tolist() for rollout in rollouts}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_nodes_engine_samples_with_its_given_weights(tmp_path: Path) -> None:
    learning = Learning(cases.COLOCATED.config(0))
    policy = learning.policy
    request = GroupRequest(
        lease_id=1,
        group_id=2,
        indices=tuple(range(32)),
        prompt_ids=learning.problems.prompt_ids(2),
        seed=3,
        policy_version=0,
        temperature=1.0,
        max_tokens=6,
        stop_ids=learning.settings.stop_ids,
    )
    weights = {name: weight + 0.05 for name, weight in policy.published().items()}
    base = in_order(by_policy(policy, policy.published(), [request]))
    moved = in_order(by_policy(policy, weights, [request]))
    assert tokens(moved) != tokens(base)
    exact = NodeEngine("llama_cpp", "f32", base_dir=learning.settings.base_dir, scratch=tmp_path)
    rounded = NodeEngine("llama_cpp", "q8_0", base_dir=learning.settings.base_dir, scratch=tmp_path)
    try:
        for weights_now, expected in ((weights, moved), (policy.published(), base)):
            drawn = in_order(exact(policy, weights_now, [request]))
            assert tokens(drawn) == tokens(expected)
            for ours, theirs in zip(drawn, expected, strict=True):
                np.testing.assert_allclose(ours.behavior_logprobs, theirs.behavior_logprobs, atol=1e-3)
        by_rounded = in_order(rounded(policy, weights, [request]))
        other = [
            abs(ours.behavior_logprobs[0] - theirs.behavior_logprobs[0])
            for ours, theirs in zip(by_rounded, moved, strict=True)
            if ours.completion_ids[0] == theirs.completion_ids[0]
        ]
        assert max(other) > 1e-4, "its weights have eight bits"
    finally:
        exact.close()
        rounded.close()
