from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from echo_hub.learner.batch import build_micro_batches
from echo_hub.learner.grpo import group_advantages
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import accumulate_gradient, make_optimizer, train_step
from echo_shared.draws import derive_seed
from echo_shared.sampling import GroupRequest
from echo_shared.torch_sampler import sample_groups

MakeGroups = Callable[[int], list[TrainingGroup]]


def gradient(policy: Policy, groups: list[TrainingGroup], *, tokens: int, shared: int = 256) -> torch.Tensor:
    """The whole step's gradient, in micro-batches of at most `tokens` tokens."""
    policy.model.zero_grad(set_to_none=True)
    values = [group_advantages(np.array([r.reward for r in group.rollouts])) for group in groups]
    completion_tokens = sum(len(r.completion_ids) for group in groups for r in group.rollouts)
    for batch in build_micro_batches(groups, values, micro_batch_tokens=tokens, shared_row_tokens=shared):
        accumulate_gradient(policy, batch, completion_tokens=completion_tokens, clip_epsilon=0.2)
    return torch.cat([p.grad.flatten() for p in policy.parameters.values() if p.grad is not None])


@pytest.fixture
def policy(settings: LearnerSettings) -> Policy:
    policy = Policy.load(settings)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
    return policy


def test_the_split_does_not_change_the_gradient(policy: Policy, make_groups: MakeGroups) -> None:
    groups = make_groups(0) + make_groups(1)
    whole = gradient(policy, groups, tokens=100_000)
    assert whole.abs().max() > 1e-3
    for tokens, shared in ((64, 256), (20, 256), (100_000, 0), (30, 0), (64, 12)):
        torch.testing.assert_close(gradient(policy, groups, tokens=tokens, shared=shared), whole, atol=1e-6, rtol=0)


def test_groups_without_advantage_only_count_in_the_denominator(policy: Policy, make_groups: MakeGroups) -> None:
    groups = make_groups(0)
    equal = groups[4]
    without = groups[:4] + groups[5:]
    tokens = sum(len(r.completion_ids) for group in without for r in group.rollouts)
    more = sum(len(r.completion_ids) for r in equal.rollouts)
    expected = gradient(policy, without, tokens=10_000) * tokens / (tokens + more)
    torch.testing.assert_close(gradient(policy, groups, tokens=10_000), expected, atol=1e-7, rtol=1e-5)


def test_a_step_against_the_plain_formula(policy: Policy, make_groups: MakeGroups, settings: LearnerSettings) -> None:
    groups = make_groups(2)
    policy.model.zero_grad(set_to_none=True)
    total, tokens = torch.zeros(()), 0
    for group in groups:
        rewards = torch.tensor([rollout.reward for rollout in group.rollouts])
        for rollout, advantage in zip(group.rollouts, rewards - rewards.mean(), strict=True):
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, rollout.completion_ids]).astype(np.int64))
            logits = policy.model(input_ids=ids[None]).logits[0] / settings.temperature
            start = len(group.prompt_ids)
            logprobs = logits.log_softmax(-1)[torch.arange(start - 1, len(ids) - 1), ids[start:]]
            ratio = (logprobs - torch.tensor(rollout.behavior_logprobs)).exp()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
            tokens += len(rollout.completion_ids)
    (total / tokens).backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters.values() if p.grad is not None])
    torch.testing.assert_close(gradient(policy, groups, tokens=64), expected, atol=1e-6, rtol=1e-4)
    metrics = train_step(policy, make_optimizer(policy, settings.training), groups, settings.training)
    assert metrics["loss"] == pytest.approx(float(total.detach()) / tokens, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-4)
    assert metrics["completion_tokens"] == tokens
    assert metrics["share_without_advantage"] == pytest.approx(1 / 6)
    assert metrics["updated"] == 1


def test_equal_rewards_leave_the_policy_alone(
    policy: Policy, make_groups: MakeGroups, settings: LearnerSettings
) -> None:
    optimizer = make_optimizer(policy, settings.training)
    train_step(policy, optimizer, make_groups(0), settings.training)  # Adam now has momentum.
    before = [parameter.detach().clone() for parameter in policy.parameters.values()]
    equal = [
        replace(group, rollouts=tuple(replace(rollout, reward=0.1) for rollout in group.rollouts))
        for group in make_groups(1)
    ]
    metrics = train_step(policy, optimizer, equal, settings.training)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters.values(), strict=True))
    assert (metrics["updated"], metrics["grad_norm"], metrics["loss"]) == (0, 0, 0)
    assert metrics["share_without_advantage"] == 1
    assert "mismatch_kl" not in metrics


def test_it_learns(make_settings: Callable[..., LearnerSettings]) -> None:
    """Reward for tokens below 10: the share of such tokens rises well above a random policy's quarter."""
    settings = make_settings(learning_rate=2e-2).model_copy(update={"temperature": 1.0})
    policy = Policy.load(settings)
    optimizer = make_optimizer(policy, settings.training)
    rewards, kls = [], []
    for step in range(1, 13):
        requests = [
            GroupRequest(
                lease_id=number,
                group_id=number,
                indices=tuple(range(8)),
                prompt_ids=np.array([2 + number, 30], dtype=np.int32),
                seed=derive_seed(step, number),
                policy_version=step - 1,
                temperature=1.0,
                max_tokens=4,
                stop_ids=(),
            )
            for number in range(8)
        ]
        by_group: dict[int, list[TrainingRollout]] = {number: [] for number in range(8)}
        for rollout in sample_groups(policy.model, requests):
            by_group[rollout.group_id].append(
                TrainingRollout(
                    completion_ids=rollout.completion_ids,
                    behavior_logprobs=rollout.behavior_logprobs,
                    reward=float((rollout.completion_ids < 10).mean()),
                )
            )
        groups = [
            TrainingGroup(prompt_ids=request.prompt_ids, rollouts=tuple(by_group[request.group_id]))
            for request in requests
        ]
        metrics = train_step(policy, optimizer, groups, settings.training)
        rewards.append(metrics["mean_reward"])
        kls.append(metrics["mismatch_kl"])
    assert np.mean(rewards[:2]) < 0.45
    assert np.mean(rewards[-2:]) > 0.75
    assert max(kls) < 1e-6, "sampler and learner agree on the probabilities of a fresh rollout"
