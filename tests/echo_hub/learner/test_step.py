from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner import logprobs
from echo_hub.learner.batch import build_micro_batches
from echo_hub.learner.history import NO_HISTORY, History
from echo_hub.learner.objectives.loss import StepLoss
from echo_hub.learner.objectives.registry import OBJECTIVES
from echo_hub.learner.policy import Policy
from echo_hub.learner.ranks import ALONE
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import accumulate_gradient, make_optimizer, screened_step, train_step
from echo_hub.learner.weighting import weigh
from echo_shared.records.step_figures import ENTROPY, ENTROPY_COEFFICIENT
from echo_shared.sampling.draws import derive_seed
from echo_shared.sampling.interface import GroupRequest
from echo_shared.sampling.torch_sampler import sample_groups
from echo_shared.wire.messages import FinishReason

MakeGroups = Callable[[int], list[TrainingGroup]]
MakeSettings = Callable[..., LearnerSettings]

PLAIN = {"aggregation": "token_mean", "advantage": "mean"}
CORRECTED: list[dict[str, Any]] = [
    {"name": name, "sequence_veto": veto} for name in OBJECTIVES for veto in (0.0, 0.02)
] + [
    {"old_policy": "proximal"},
    {"old_policy": "proximal", "correction": "tis"},
    {"name": "cispo", "old_policy": "proximal", "correction": "masked_is", "sequence_veto": 0.02},
    {"name": "gspo", "old_policy": "proximal", "correction": "tis", "aggregation": "group_mean"},
    {"name": "dapo", "kl_coefficient": 0.1, "overlong": "penalty", "overlong_buffer_tokens": 4},
    {"name": "gspo", "sequence_mask": 0.02, "kl_coefficient": 0.1},
    {"name": "dr_grpo", "selection": "shuffle_r1", "kl_coefficient": 0.1, "sequence_veto": 0.02},
    {"name": "two_sided", "selection": "shuffle_r1", "shuffle_batches": 3},
    {"entropy_coefficient": 0.3, "sequence_veto": 0.02},
    {"name": "gspo", "entropy_coefficient": 0.3, "kl_coefficient": 0.1},
]
"""Each objective alone, and objectives with several corrections at once."""


def gradient(policy: Policy, groups: list[TrainingGroup], settings: LearnerSettings, *, tokens: int) -> torch.Tensor:
    policy.model.zero_grad(set_to_none=True)
    loss = StepLoss(settings.objective)
    for batch in build_micro_batches(weigh(groups, settings).updates[0], micro_batch_tokens=tokens):
        accumulate_gradient(policy, batch, loss)
    return torch.cat([p.grad.flatten() for p in policy.parameters.values() if p.grad is not None])


def with_turns(groups: Sequence[TrainingGroup], seed: int = 0) -> list[TrainingGroup]:
    """Mark about half of each rollout's tokens as written by an environment; the last token stays a sampled one."""
    rng = np.random.default_rng(seed)

    def masked(rollout: TrainingRollout) -> TrainingRollout:
        mask = rng.random(len(rollout.completion_ids)) < 0.5
        mask[-1] = True
        logprobs = np.where(mask, rollout.behavior_logprobs, 0).astype(np.float32)
        return replace(rollout, loss_mask=mask, behavior_logprobs=logprobs)

    return [replace(group, rollouts=tuple(masked(rollout) for rollout in group.rollouts)) for group in groups]


@pytest.fixture(scope="module")
def loaded(base_dir: Path) -> Policy:
    return Policy.load(
        LearnerSettings(
            base_dir=base_dir,
            seed=3,
            temperature=0.8,
            max_tokens=6,
            stop_ids=(1,),
            training=TrainingConfig(lora_rank=4, lora_alpha=8),
            learner=LearnerConfig(threads=1, device="cpu"),
        )
    )


@pytest.fixture
def policy(loaded: Policy) -> Policy:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in loaded.parameters.values():
            parameter.normal_(std=0.1, generator=generator)
    return loaded


@pytest.mark.parametrize("turns", [False, True], ids=["one turn", "turns"])
@pytest.mark.parametrize("objective", CORRECTED, ids=str)
def test_the_split_does_not_change_the_gradient(
    policy: Policy, make_groups: MakeGroups, make_settings: MakeSettings, objective: dict[str, Any], turns: bool
) -> None:
    groups = make_groups(0) + make_groups(1)
    groups = with_turns(groups) if turns else groups
    settings = make_settings(objective=objective)
    weighted = weigh(groups, settings).updates[0]
    # Find the token budget that gives seven micro-batches.
    seven = bisect_left(
        range(10_000), True, key=lambda budget: len(build_micro_batches(weighted, micro_batch_tokens=budget)) <= 7
    )
    assert len(build_micro_batches(weighted, micro_batch_tokens=seven)) == 7
    assert len(build_micro_batches(weighted, micro_batch_tokens=100_000)) == 1
    whole = gradient(policy, groups, settings, tokens=100_000)
    assert whole.abs().max() > 1e-4
    torch.testing.assert_close(gradient(policy, groups, settings, tokens=seven), whole, atol=1e-6, rtol=0)
    if settings.objective.sequence_veto:
        metrics = train_step(policy, make_optimizer(policy, settings.training), groups, settings)
        assert 0 < metrics["rollouts_vetoed"] < sum(len(group.rollouts) for group in weighted)


def test_groups_without_advantage_only_count_in_the_denominator(
    policy: Policy, make_groups: MakeGroups, make_settings: MakeSettings
) -> None:
    settings = make_settings(objective=PLAIN)
    groups = make_groups(0)
    equal = groups[4]
    without = groups[:4] + groups[5:]
    tokens = sum(len(r.completion_ids) for group in without for r in group.rollouts)
    more = sum(len(r.completion_ids) for r in equal.rollouts)
    expected = gradient(policy, without, settings, tokens=10_000) * tokens / (tokens + more)
    torch.testing.assert_close(gradient(policy, groups, settings, tokens=10_000), expected, atol=1e-7, rtol=1e-5)


def plain_logits(
    policy: Policy, group: TrainingGroup, rollout: TrainingRollout, settings: LearnerSettings
) -> torch.Tensor:
    """Return the logits [T, V] before each token after the prompt, from one unpadded sequence."""
    ids = torch.from_numpy(np.concatenate([group.prompt_ids, rollout.completion_ids]).astype(np.int64))
    logits: torch.Tensor = policy.model(input_ids=ids[None]).logits[0] / settings.temperature
    return logits[len(group.prompt_ids) - 1 : len(ids) - 1]


def plain_logprobs(
    policy: Policy, group: TrainingGroup, rollout: TrainingRollout, settings: LearnerSettings
) -> torch.Tensor:
    ids = torch.from_numpy(rollout.completion_ids.astype(np.int64))
    return plain_logits(policy, group, rollout, settings).log_softmax(-1)[torch.arange(len(ids)), ids]


@pytest.mark.parametrize("turns", [False, True], ids=["one turn", "turns"])
@pytest.mark.parametrize(("kl", "bonus"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.1, 0.3)])
def test_a_step_against_the_plain_formula(
    policy: Policy, make_groups: MakeGroups, make_settings: MakeSettings, turns: bool, kl: float, bonus: float
) -> None:
    """GRPO's formula: the mean over rollouts of the mean loss of each rollout's sampled tokens."""
    settings = make_settings(objective={"name": "grpo", "kl_coefficient": kl, "entropy_coefficient": bonus})
    groups = with_turns(make_groups(2)) if turns else make_groups(2)
    policy.model.zero_grad(set_to_none=True)
    losses, tokens = [], 0
    for group in groups:
        rewards = torch.tensor([rollout.reward for rollout in group.rollouts])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            drawn = torch.from_numpy(rollout.loss_mask)
            with torch.no_grad(), policy.model.disable_adapter():
                reference = plain_logprobs(policy, group, rollout, settings)[drawn]
            logprobs = plain_logprobs(policy, group, rollout, settings)[drawn]
            ratio = (logprobs - torch.tensor(rollout.behavior_logprobs)[drawn]).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            log_ratio = reference - logprobs
            line = math.exp(3) - 4 + (math.exp(3) - 1) * (log_ratio - 3)
            k3 = torch.where(log_ratio > 3, line, log_ratio.clamp(max=3).exp() - 1 - log_ratio)
            logs = plain_logits(policy, group, rollout, settings)[drawn].log_softmax(-1)
            entropy = -(logs.exp() * logs).sum(-1)
            losses.append((kl * k3 - surrogate - bonus * entropy).mean())
            tokens += int(drawn.sum())
    total = torch.stack(losses).mean()
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters.values() if p.grad is not None])
    torch.testing.assert_close(gradient(policy, groups, settings, tokens=64), expected, atol=1e-6, rtol=1e-4)
    metrics = train_step(policy, make_optimizer(policy, settings.training), groups, settings)
    assert metrics["loss"] == pytest.approx(float(total.detach()), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-4)
    assert metrics["completion_tokens"] == tokens
    rewards = np.array([[rollout.reward for rollout in group.rollouts] for group in groups])
    assert metrics["reward_std"] == pytest.approx(rewards.std())
    assert metrics["reward_std_within"] == pytest.approx(rewards.std(axis=1).mean())
    assert metrics["completion_length"] == pytest.approx(tokens / rewards.size)
    assert metrics["share_without_advantage"] == pytest.approx(1 / 6)
    assert metrics["updated"] == 1
    assert ("base_kl" in metrics) == bool(kl)
    assert metrics.get(ENTROPY_COEFFICIENT.key, 0.0) == bonus


@pytest.mark.parametrize("tokens", [64, 10_000])
def test_the_entropy_is_the_mean_over_trained_tokens(
    policy: Policy, make_groups: MakeGroups, make_settings: MakeSettings, tokens: int
) -> None:
    """Neither an environment's tokens nor groups without advantage may count."""
    settings = make_settings(learner={"micro_batch_tokens": tokens})
    groups = with_turns(make_groups(3))
    with torch.no_grad():
        of_each = [
            torch.distributions.Categorical(
                logits=plain_logits(policy, group, rollout, settings)[torch.from_numpy(rollout.loss_mask)]
            ).entropy()
            for group in groups
            if len({rollout.reward for rollout in group.rollouts}) > 1
            for rollout in group.rollouts
        ]
    metrics = train_step(policy, make_optimizer(policy, settings.training), groups, settings)
    assert metrics["computed_tokens"] == len(torch.cat(of_each))
    assert metrics["entropy"] == pytest.approx(float(torch.cat(of_each).mean()), rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_environment_tokens_are_not_trained_on(
    policy: Policy, make_groups: MakeGroups, make_settings: MakeSettings, name: str
) -> None:
    """Here environment tokens have log-probabilities of -inf, which would change the gradient if they took part."""
    settings = make_settings(objective={"name": name, "sequence_veto": 1e-4})
    groups = with_turns(make_groups(3))
    noisy = [
        replace(
            group,
            rollouts=tuple(
                replace(r, behavior_logprobs=np.where(r.loss_mask, r.behavior_logprobs, -np.inf).astype(np.float32))
                for r in group.rollouts
            ),
        )
        for group in groups
    ]
    before, after = (gradient(policy, given, settings, tokens=64) for given in (groups, noisy))
    assert torch.equal(before, after) and before.abs().max() > 0


def test_vetoed_rollouts_lose_only_their_weight(
    policy: Policy, make_groups: MakeGroups, make_settings: MakeSettings
) -> None:
    """Vetoed rollouts get no gradient but keep their place in the denominator, so all other gradients stay the same."""
    groups = make_groups(0)
    first = groups[0].rollouts[0]
    impossible = replace(first, behavior_logprobs=np.full(len(first.completion_ids), 20.0, dtype=np.float32))
    vetoed = [replace(groups[0], rollouts=(impossible, *groups[0].rollouts[1:])), *groups[1:]]
    settings = make_settings(objective={"name": "dapo", "sequence_veto": 1e-8})
    masked = [
        replace(groups[0], rollouts=(replace(first, finish_reason=FinishReason.LENGTH), *groups[0].rollouts[1:])),
        *groups[1:],
    ]
    leaving_out = make_settings(objective={"name": "dapo", "overlong": "mask"})
    tokens = sum(len(r.completion_ids) for group in groups for r in group.rollouts)
    expected = gradient(policy, masked, leaving_out, tokens=100) * (tokens - len(first.completion_ids)) / tokens
    torch.testing.assert_close(gradient(policy, vetoed, settings, tokens=100), expected, atol=1e-7, rtol=1e-4)
    metrics = train_step(policy, make_optimizer(policy, settings.training), vetoed, settings)
    assert metrics["rollouts_vetoed"] == 1


def test_a_step_with_only_vetoed_rollouts_leaves_the_policy_unchanged(
    policy: Policy, make_groups: MakeGroups, make_settings: MakeSettings
) -> None:
    settings = make_settings(objective={"sequence_veto": 0.9})
    optimizer = make_optimizer(policy, settings.training)
    train_step(policy, optimizer, make_groups(0), make_settings())  # Adam has momentum from here on.
    before = [parameter.detach().clone() for parameter in policy.parameters.values()]
    groups = [
        replace(
            group,
            rollouts=tuple(replace(r, behavior_logprobs=np.zeros_like(r.behavior_logprobs)) for r in group.rollouts),
        )
        for group in make_groups(1)
    ]
    metrics = train_step(policy, optimizer, groups, settings)
    assert metrics["rollouts_vetoed"] == 20 and metrics["updated"] == 0 and metrics["loss"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters.values(), strict=True))


def trained(
    settings: LearnerSettings, groups: list[TrainingGroup], steps: int = 1
) -> tuple[list[torch.Tensor], dict[str, float]]:
    policy = Policy.load(settings)
    optimizer = make_optimizer(policy, settings.training)
    for _ in range(steps):
        metrics = train_step(policy, optimizer, groups, settings)
    return [parameter.detach().clone() for parameter in policy.parameters.values()], metrics


def test_several_updates_are_steps_on_the_shares(make_groups: MakeGroups, make_settings: MakeSettings) -> None:
    """Updates are independent if the old log-probabilities are the sampler's: two updates of a step equal two steps on
    alternate groups.
    """
    groups = make_groups(0)[:4]  # All have an advantage, so both shares are equally large.
    constant = {"objective": {"name": "dr_grpo"}}
    expected = Policy.load(make_settings(**constant))
    optimizer = make_optimizer(expected, make_settings().training)
    single = [train_step(expected, optimizer, part, make_settings(**constant)) for part in (groups[::2], groups[1::2])]
    weights, metrics = trained(make_settings(training={"updates_per_step": 2}, **constant), groups)
    for ours, theirs in zip(weights, expected.parameters.values(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), atol=1e-6, rtol=1e-5)
    assert metrics["updated"] == 2
    assert metrics["loss"] == pytest.approx(np.mean([one["loss"] for one in single]), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(np.mean([one["grad_norm"] for one in single]), rel=1e-4)
    assert metrics["computed_tokens"] == sum(one["computed_tokens"] for one in single)


def test_updates_are_deterministic_and_never_more_than_groups(
    make_groups: MakeGroups, make_settings: MakeSettings
) -> None:
    settings = make_settings(training={"updates_per_step": 64}, objective={"name": "decoupled_ppo"})
    (first, metrics), (again, _) = (trained(settings, make_groups(0), steps=2) for _ in range(2))
    assert metrics["updated"] == 5, "the sixth group has no advantage"
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def of_eight(make_groups: MakeGroups) -> list[TrainingGroup]:
    """Return five groups of eight rollouts; selection keeps two pairs of each."""
    return [
        replace(one, rollouts=one.rollouts + other.rollouts)
        for number, (one, other) in enumerate(zip(make_groups(0), make_groups(1), strict=True))
        if number != 4
    ]


SHUFFLED = {
    "objective": {"name": "dr_grpo", "selection": "shuffle_r1", "shuffle_batches": 4},
    "training": {"updates_per_step": 2},
}


def by_hand(settings: LearnerSettings, groups: list[TrainingGroup], *, without: int | None = None) -> Policy:
    """Return a policy trained in two updates whose gradient steps are made here, independently of `train_step`.
    `without`: number of a group to leave out.
    """
    policy = Policy.load(settings)
    optimizer = make_optimizer(policy, settings.training)
    for update in weigh(groups, settings).updates:
        kept = [group for group in update if group.number != without]
        optimizer.zero_grad(set_to_none=True)
        for batch in build_micro_batches(kept, micro_batch_tokens=100_000):
            accumulate_gradient(policy, batch, StepLoss(settings.objective), scale=2.0)
        torch.nn.utils.clip_grad_norm_(policy.parameters.values(), settings.training.max_grad_norm)
        optimizer.step()
    return policy


def test_each_update_is_a_step_on_its_own_sub_batches(make_groups: MakeGroups, make_settings: MakeSettings) -> None:
    groups, settings = of_eight(make_groups), make_settings(**SHUFFLED)
    first, second = ({one.number for of in update for one in of.rollouts} for update in weigh(groups, settings).updates)
    assert first & second and first - second and second - first
    weights, metrics = trained(settings, groups)
    for ours, theirs in zip(weights, by_hand(settings, groups).parameters.values(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), atol=1e-6, rtol=1e-5)
    assert metrics["updated"] == 2
    again, _ = trained(settings, groups)
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))


def test_a_group_forged_in_a_later_update_is_in_no_update(make_groups: MakeGroups, make_settings: MakeSettings) -> None:
    settings = make_settings(**SHUFFLED)
    honest = of_eight(make_groups)
    first, second = weigh(honest, settings).updates
    early = {one.number for of in first for one in of.rollouts}
    late = [(of.number, one.number) for of in second for one in of.rollouts if one.number not in early]
    group, number = next(place for place in late if place[0] in [of.number for of in first])
    groups = forged(honest, group, number % 8, -60.0)
    policy = Policy.load(settings)
    outcome = screened_step(policy, make_optimizer(policy, settings.training), groups, settings)
    assert (outcome.screen["left_out"], outcome.screen["suspects"]) == ([group], [number])
    for ours, theirs in zip(
        policy.parameters.values(), by_hand(settings, groups, without=group).parameters.values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_the_proximal_policy_is_from_the_start_of_the_step(
    make_groups: MakeGroups, make_settings: MakeSettings
) -> None:
    """During the first update of a step, learner and proximal policy are equal, so nothing is clipped; later updates
    can be.
    """
    objective = {"name": "grpo", "old_policy": "proximal", "clip_low": 1e-6, "clip_high": 1e-6}
    _, one = trained(make_settings(objective=objective), make_groups(0))
    assert one["clip_fraction"] == 0
    large = {"updates_per_step": 3, "learning_rate": 0.1}
    _, several = trained(make_settings(objective=objective, training=large), make_groups(0), steps=2)
    assert 0 < several["clip_fraction"] < 1


def test_metrics_of_corrections(make_groups: MakeGroups, make_settings: MakeSettings) -> None:
    objective = {"old_policy": "proximal", "correction": "masked_is", "selection": "shuffle_r1"}
    metrics = trained(make_settings(objective=objective), make_groups(0))[1]
    assert 0 < metrics["correction_share"] < 1 and 0 < metrics["correction_weight"] < 2
    assert metrics["rollouts_unselected"] == 12 and metrics["groups_without_advantage"] == 1
    assert "correction_share" not in trained(make_settings(), make_groups(0))[1]


def test_equal_rewards_leave_the_policy_alone(
    policy: Policy, make_groups: MakeGroups, settings: LearnerSettings
) -> None:
    optimizer = make_optimizer(policy, settings.training)
    train_step(policy, optimizer, make_groups(0), settings)  # Adam has momentum from here on.
    before = [parameter.detach().clone() for parameter in policy.parameters.values()]
    equal = [
        replace(group, rollouts=tuple(replace(rollout, reward=0.1) for rollout in group.rollouts))
        for group in make_groups(1)
    ]
    metrics = train_step(policy, optimizer, equal, settings)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters.values(), strict=True))
    assert (metrics["updated"], metrics["grad_norm"], metrics["loss"]) == (0, 0, 0)
    assert metrics["share_without_advantage"] == 1
    assert "mismatch_kl" not in metrics


def test_only_finite_metrics_leave_a_step(
    policy: Policy, make_groups: MakeGroups, make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """JSON has no NaN. One NaN weight makes all computed values NaN, which must not reach other weights or the
    metrics.
    """
    settings = make_settings(objective={"kl_coefficient": 0.1})
    optimizer = make_optimizer(policy, settings.training)
    name, poisoned = list(policy.parameters.items())[-1]
    with torch.no_grad():
        poisoned.fill_(float("nan"))
    before = {other: weight.detach().clone() for other, weight in policy.parameters.items()}
    metrics = train_step(policy, optimizer, make_groups(0), settings)
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert metrics["updated"] == 0 and {"loss", "grad_norm", "base_kl"}.isdisjoint(metrics)
    assert "not finite" in caplog.text and "grad_norm" in caplog.text
    assert all(torch.equal(before[other], policy.parameters[other]) for other in before.keys() - {name})


def run_below_ten(settings: LearnerSettings, *, steps: int) -> list[dict[str, float]]:
    """Train the policy on its own rollouts, where tokens below 10 earn a reward. Return each step's metrics."""
    settings = settings.model_copy(update={"temperature": 1.0})
    policy = Policy.load(settings)
    optimizer = make_optimizer(policy, settings.training)
    history, curve = NO_HISTORY, []
    for step in range(1, steps + 1):
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
                    **rollout.content(),
                    loss_mask=np.ones(len(rollout.completion_ids), dtype=bool),
                    reward=float((rollout.completion_ids < 10).mean()),
                )
            )
        groups = [
            TrainingGroup(prompt_ids=request.prompt_ids, rollouts=tuple(by_group[request.group_id]))
            for request in requests
        ]
        outcome = screened_step(policy, optimizer, groups, settings, learner_version=step - 1, history=history)
        history = outcome.history
        curve.append(outcome.metrics)
    return curve


def test_steps_raise_the_reward(make_settings: MakeSettings) -> None:
    """Rewards here are the share of tokens below 10: about a quarter before training."""
    curve = run_below_ten(make_settings(training={"learning_rate": 2e-2}), steps=12)
    rewards = [metrics["mean_reward"] for metrics in curve]
    assert np.mean(rewards[:2]) < 0.45
    assert np.mean(rewards[-2:]) > 0.75
    kls = [metrics["mismatch_kl"] for metrics in curve]
    assert max(kls) < 1e-6, "sampler and learner agree on the probabilities of a fresh rollout"


def test_an_entropy_that_collapses_stays_near_a_target(make_settings: MakeSettings) -> None:
    def newest(**objective: float) -> list[float]:
        settings = make_settings(training={"learning_rate": 1e-2}, objective=objective)
        return [metrics[ENTROPY.key] for metrics in run_below_ten(settings, steps=40)][-15:]

    assert max(newest()) < 0.6
    held = newest(entropy_target=2.0, entropy_delta=0.03, entropy_max=0.3)
    assert min(held) > 1.0 and abs(np.mean(held) - 2.0) < 0.5


def forged(groups: list[TrainingGroup], number: int, index: int, claim: float) -> list[TrainingGroup]:
    rollouts = list(groups[number].rollouts)
    claims = np.full_like(rollouts[index].behavior_logprobs, claim)
    rollouts[index] = replace(rollouts[index], behavior_logprobs=claims)
    return [*groups[:number], replace(groups[number], rollouts=tuple(rollouts)), *groups[number + 1 :]]


def weights_of(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in policy.parameters.values()])


def left_in(policy: Policy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.parameters.values() if p.grad is not None])


@pytest.mark.parametrize("index", [0, 3], ids=["its first", "its last"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("objective", [{}, {"name": "gspo", "old_policy": "proximal", "kl_coefficient": 0.1}], ids=str)
def test_an_impossible_rollout_is_dropped_with_its_group(
    policy: Policy,
    make_groups: MakeGroups,
    make_settings: MakeSettings,
    objective: dict[str, Any],
    is_split: bool,
    index: int,
) -> None:
    groups = forged(make_groups(3), 2, index, -60.0)
    weighted = weigh(groups, make_settings(objective=objective)).updates[0]

    def parts(tokens: int) -> int:
        return sum(2 in batch.groups for batch in build_micro_batches(weighted, micro_batch_tokens=tokens))

    tokens = next(tokens for tokens in range(64, 1_000) if (parts(tokens) > 1) is is_split)
    settings = make_settings(
        objective=objective, training={"max_grad_norm": 1e9}, learner={"micro_batch_tokens": tokens}
    )
    kept = [group for group in weighted if group.number != 2]
    policy.model.zero_grad(set_to_none=True)
    for batch in build_micro_batches(kept, micro_batch_tokens=100_000):
        accumulate_gradient(policy, batch, StepLoss(settings.objective))
    expected = left_in(policy)
    outcome = screened_step(policy, make_optimizer(policy, settings.training), groups, settings)
    torch.testing.assert_close(left_in(policy), expected, atol=1e-6, rtol=1e-5)
    assert outcome.screen["left_out"] == [2] and outcome.screen["suspects"] == [2 * 4 + index]
    assert (outcome.metrics["groups_left_out"], outcome.metrics["updated"]) == (1, 1)
    trained = sum(len(rollout.completion_ids) for group in kept for rollout in group.rollouts)
    assert outcome.metrics["computed_tokens"] == trained


def test_a_step_of_which_all_is_left_out_changes_nothing(
    policy: Policy, make_groups: MakeGroups, settings: LearnerSettings
) -> None:
    groups = make_groups(0)
    for number in range(len(groups)):
        groups = forged(groups, number, 1, -60.0)
    before = weights_of(policy)
    outcome = screened_step(policy, make_optimizer(policy, settings.training), groups, settings)
    assert torch.equal(weights_of(policy), before)
    assert (outcome.metrics["updated"], outcome.metrics["held_back"], outcome.metrics["computed_tokens"]) == (0, 0, 0)
    assert outcome.history.norms == ()


@pytest.mark.parametrize("objective", ["grpo", "two_sided", "sapo"])
def test_an_outlying_gradient_is_skipped_and_its_rollout_named(
    policy: Policy, make_groups: MakeGroups, make_settings: MakeSettings, objective: str
) -> None:
    settings = make_settings(objective={"name": objective})
    groups = make_groups(0)
    worst = min(range(4), key=lambda index: groups[3].rollouts[index].reward)
    rollout = groups[3].rollouts[worst]
    claims = rollout.behavior_logprobs.copy()
    claims[0] = -18.0  # A single token of probability 1e-8 is no proof of a forgery.
    rollouts = [*groups[3].rollouts]
    rollouts[worst] = replace(rollout, behavior_logprobs=claims)
    groups[3] = replace(groups[3], rollouts=tuple(rollouts))
    start = weights_of(policy)
    honest = screened_step(policy, make_optimizer(policy, settings.training), make_groups(0), settings).history.norms
    torch.nn.utils.vector_to_parameters(start.clone(), policy.parameters.values())
    optimizer = make_optimizer(policy, settings.training)
    outcome = screened_step(policy, optimizer, groups, settings, history=History(norms=honest * 8))
    bounded = objective != "grpo"
    assert (outcome.metrics["updated"], outcome.metrics["held_back"]) == ((1, 0) if bounded else (0, 1))
    assert torch.equal(weights_of(policy), start) is not bounded
    assert bool(optimizer.state) is bounded, "Adam's momentum is unchanged too"
    assert outcome.screen["suspects"] == ([] if bounded else [3 * 4 + worst])
    assert len(outcome.history.norms) == 9, "the history continues, so that a lasting change is followed"


def test_a_step_reports_its_screening(policy: Policy, make_groups: MakeGroups, settings: LearnerSettings) -> None:
    groups = make_groups(0)
    drawn = tuple(
        replace(rollout, draws=np.array([[7, index, len(rollout.completion_ids)]], np.uint64))
        for index, rollout in enumerate(groups[1].rollouts)
    )
    groups[1] = replace(groups[1], rollouts=drawn)
    said = screened_step(policy, make_optimizer(policy, settings.training), groups, settings).screen
    assert said["screened"] == [4, 5, 6, 7], "the other rollouts' uniforms are unknown"
    tokens = [len(rollout.completion_ids) for rollout in drawn]
    assert [sum(counts) for counts in said["draws"]] == [sum(counts) for counts in said["claims"]] == tokens


class _Operations(TorchDispatchMode):
    """Counts operations by name, on the device `meta`. This device stands in for a GPU, and its tensors have no values.
    An operation that waits for a value of the device gets a constant. Other operations that need values, such as
    indexing with a mask, fail."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_copied = func is torch.ops.aten._to_copy.default and str(kwargs.get("device")) == "cpu"
        is_read = func is torch.ops.aten._local_scalar_dense.default
        waits = (is_copied or is_read) and args[0].is_meta
        self.names.append("wait" if waits else str(func))
        if not waits:
            return func(*args, **kwargs)
        return torch.full(args[0].shape, -3.0) if is_copied else 1.0


@pytest.mark.parametrize("objective", [PLAIN, {"name": "gspo", "sequence_mask": 0.02, "kl_coefficient": 0.1}], ids=str)
def test_a_step_waits_once_a_micro_batch_and_twice_at_its_end(
    make_groups: MakeGroups, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, objective: dict[str, Any]
) -> None:
    settings = make_settings(objective=objective, learner={"micro_batch_tokens": 64})
    groups = with_turns(make_groups(0))
    for elements in (logprobs.CHUNK_ELEMENTS, logprobs.EXPONENT_ELEMENTS):
        monkeypatch.setitem(elements, "meta", elements["cpu"])
    loaded = Policy.load(settings)
    device = torch.device("meta")
    policy = Policy(loaded.model.to(device), settings, device=device, dtype=torch.float32, ranks=ALONE)
    policy._packs_up_to = loaded._packs_up_to
    monkeypatch.setattr(policy, "autocast", nullcontext)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # There is no autocast for `meta`.
    micro_batches = len(build_micro_batches(weigh(groups, settings).updates[0], micro_batch_tokens=64))
    with _Operations() as operations:
        screened_step(policy, torch.optim.SGD(policy.parameters.values()), groups, settings)
    assert micro_batches > 2 and operations.names.count("wait") == micro_batches + 2
    # On a GPU, this operation sorts its indices. It occurs once in a micro-batch: no layer uses it.
    assert operations.names.count("aten.embedding_dense_backward.default") == micro_batches
