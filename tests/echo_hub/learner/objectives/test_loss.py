from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.objectives.loss import STATISTICS, StepLoss
from echo_hub.learner.objectives.registry import OBJECTIVES
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout


def one_batch() -> MicroBatch:
    """Return a batch of two rollouts: three tokens of advantage 1 and weight 0.25, and two of advantage -2 and weight
    0.125. All have the behaviour probability μ = e^-1.
    """
    rollouts = tuple(
        WeightedRollout(
            completion_ids=np.arange(length, dtype=np.int32),
            loss_mask=np.ones(length, dtype=bool),
            behavior_logprobs=np.full(length, -1.0, dtype=np.float32),
            advantages=np.full(length, advantage),
            weight=weight,
        )
        for length, advantage, weight in ((3, 1.0, 0.25), (2, -2.0, 0.125))
    )
    (batch,) = build_micro_batches([WeightedGroup(prompt_ids=np.array([7]), rollouts=rollouts)], micro_batch_tokens=99)
    return batch


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios).log() - 1


def outcome(
    settings: dict[str, Any],
    learner: torch.Tensor,
    proximal: torch.Tensor | None = None,
    reference: float | None = None,
) -> tuple[float, list[float], dict[str, float]]:
    """Return the loss, its gradient by each token's log-probability, and the statistics of the step."""
    learner = learner.clone().requires_grad_()
    loss, statistics = StepLoss(ObjectiveConfig(**settings))(
        one_batch(),
        learner,
        proximal_logprobs_N=proximal,
        reference_logprobs_N=None if reference is None else logs(*[reference] * 5),
        entropies_N=torch.arange(5.0),
    )
    (gradient,) = torch.autograd.grad(loss, learner)
    return loss.item(), gradient.tolist(), dict(zip(STATISTICS, statistics.tolist(), strict=True))


def test_grpo_by_hand() -> None:
    loss, gradient, statistics = outcome({"name": "grpo"}, logs(1.0, 1.5, 0.5, 2.0, 0.5))
    assert loss == pytest.approx(0.25 * -(1 + 1.2 + 0.5) + 0.125 * 2 * (2 + 0.8))
    assert gradient == pytest.approx([-0.25, 0, -0.125, 0.5, 0])
    assert statistics["tokens"] == 5 and statistics["clipped"] == 2 and statistics["entropy"] == 10
    assert statistics["ratio"] == pytest.approx(5.5) and statistics["ratio_max"] == pytest.approx(2)
    assert statistics["mismatch_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in (1.0, 1.5, 0.5, 2.0, 0.5)))


def test_the_naive_objective_knows_no_ratio_to_the_behavior_policy() -> None:
    _, gradient, statistics = outcome({"old_policy": "proximal"}, logs(1.0, 1.5, 0.5, 2.0, 0.5))
    assert gradient == pytest.approx([-0.25, -0.25, -0.25, 0.25, 0.25])
    assert statistics["clipped"] == 0


def test_a_masked_token_loses_its_gradient_and_keeps_its_weight_in_the_denominator() -> None:
    settings = {"old_policy": "proximal", "correction": "masked_is"}
    _, gradient, statistics = outcome(settings, logs(1.0, 3.0, 0.5, 2.0, 0.1))
    assert gradient == pytest.approx([-0.25, 0, -0.125, 0.5, 0])
    assert statistics["corrected"] == 2 and statistics["correction_weight"] == pytest.approx(3.5)


def test_truncated_importance_sampling_by_hand() -> None:
    _, gradient, _ = outcome({"old_policy": "proximal", "correction": "tis"}, logs(1.0, 3.0, 0.5, 2.0, 0.1))
    assert gradient == pytest.approx([-0.25, -0.5, -0.125, 0.5, 0.025])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_veto_takes_the_whole_rollout_out_of_every_objective(name: str, kl: float) -> None:
    settings = {"name": name, "kl_coefficient": kl}
    start = logs(1.0001, 5e-5, 0.9999, 1.0001, 1.0002)
    reference = 1.3 if kl else None
    _, plain, _ = outcome(settings, start, reference=reference)
    _, gradient, statistics = outcome({**settings, "sequence_veto": 1e-4}, start, reference=reference)
    assert gradient[:3] == [0, 0, 0] and gradient[3:] == plain[3:] != [0, 0]
    assert statistics["vetoed_rollouts"] == 1


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_sequence_mask_applies_to_every_objective(name: str) -> None:
    """Tokens of negative advantage are masked in a rollout that is too far off-policy; they keep their KL term
    (DeepSeek-V3.2).
    """
    settings = {"name": name, "kl_coefficient": 0.1}
    now = logs(0.5, 0.5, 0.5, 0.9, 0.8)
    _, plain, before = outcome(settings, now, reference=1.3)
    _, gradient, statistics = outcome({**settings, "sequence_mask": 0.1}, now, reference=1.3)
    ratios = torch.tensor([0.9, 0.8])
    assert gradient[:3] == plain[:3]
    assert gradient[3:] == pytest.approx((0.1 * 0.125 * (1 - 1.3 / ratios)).tolist())
    assert (before["vetoed_rollouts"], statistics["vetoed_rollouts"]) == (0, 1)
    # The limit is not reached: the mean of log(μ / π) is 0.16 in the second rollout.
    assert outcome({**settings, "sequence_mask": 0.2}, now, reference=1.3)[1] == plain


def test_the_veto_looks_at_the_start_of_the_step() -> None:
    settings = {"sequence_veto": 0.5}
    now, start = logs(1.0, 1.0, 1.0, 1.0, 1.0), logs(1.0, 0.1, 1.0, 1.0, 1.0)
    assert outcome(settings, now, proximal=start)[2]["vetoed_rollouts"] == 1
    assert outcome(settings, start, proximal=now)[2]["vetoed_rollouts"] == 0


def test_the_kl_term_by_hand_and_by_finite_differences() -> None:
    start = logs(1.0, 1.0, 1.0, 1.0, 1.0)
    loss, gradient, statistics = outcome({"kl_coefficient": 0.1}, start, reference=2.0)
    without = outcome({}, start)
    k3 = 2 - 1 - math.log(2)
    assert loss == pytest.approx(without[0] + 0.1 * k3 * (3 * 0.25 + 2 * 0.125))
    assert statistics["base_kl"] == pytest.approx(5 * k3)
    # The KL term is q/π - 1 - log(q/π), with q the reference policy; its derivative by log π is 1 - q/π.
    expected = [g + 0.1 * weight * (1 - 2) for g, weight in zip(without[1], [0.25] * 3 + [0.125] * 2, strict=True)]
    assert gradient == pytest.approx(expected)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_entropy_bonus_has_the_losss_weights_and_vetoes(name: str) -> None:
    """Vetoed rollouts lose their entropy bonus as well. Masked tokens keep it, like the KL term, because the bonus
    needs no off-policy correction.
    """
    entropies = torch.arange(5.0).requires_grad_()
    now = logs(0.5, 5e-5, 0.5, 0.9, 0.8)
    for settings, expected in (
        ({}, [-0.025] * 3 + [-0.0125] * 2),
        ({"sequence_mask": 0.1}, [-0.025] * 3 + [-0.0125] * 2),
        ({"sequence_veto": 1e-4}, [0.0] * 3 + [-0.0125] * 2),
    ):
        objective = ObjectiveConfig(name=name, **settings)  # type: ignore[arg-type]
        plain, _ = StepLoss(objective)(one_batch(), now, entropies_N=entropies)
        loss, _ = StepLoss(objective, entropy_coefficient=0.1)(one_batch(), now, entropies_N=entropies)
        (gradient,) = torch.autograd.grad(loss, entropies)
        assert gradient.tolist() == pytest.approx(expected) and not plain.requires_grad
        assert float(loss.detach() - plain) == pytest.approx(float((gradient * torch.arange(5.0)).sum()), abs=1e-6)


def test_a_steps_entropy_coefficient_overrides_the_settings() -> None:
    objective = ObjectiveConfig(entropy_coefficient=0.1)
    assert StepLoss(objective).needs_entropy_gradient
    assert not StepLoss(objective, entropy_coefficient=0.0).needs_entropy_gradient
    assert not StepLoss(ObjectiveConfig()).needs_entropy_gradient


@pytest.mark.parametrize("veto", [0.0, 1e-4])
def test_impossible_tokens_leave_loss_gradient_and_statistics_finite(veto: float) -> None:
    """Token 2 has probability 0 (e^-201) under the reference policy, token 4 under the learner's. Neither may cause NaN
    or inf.
    """
    learner = torch.tensor([-1.0, -1.0, -1.0, -201.0, -1.0], requires_grad=True)
    reference = torch.tensor([-1.0, -201.0, -1.0, -1.0, -1.0])
    step_loss = StepLoss(ObjectiveConfig(kl_coefficient=0.1, sequence_veto=veto))
    loss, statistics = step_loss(one_batch(), learner, reference_logprobs_N=reference)
    (gradient,) = torch.autograd.grad(loss, learner)
    assert loss.isfinite() and gradient.isfinite().all() and statistics.isfinite().all()
    found = dict(zip(STATISTICS, statistics.tolist(), strict=True))
    assert found["mismatch_kl"] == pytest.approx(199)
    # The KL term's gradient is 1 - q/π at the second token, and 1 - e³ at the fourth unless its rollout is vetoed.
    assert gradient.tolist() == pytest.approx(
        [-0.25, -0.225, -0.25, *((0, 0) if veto else (0.0125 * (1 - math.e**3), 0.25))]
    )


@pytest.mark.parametrize(("correction", "third"), [("masked_is", 0.0), ("tis", -2 / 3)])
def test_a_correction_acts_on_its_own_tokens_gradient(correction: str, third: float) -> None:
    """Corrections of the third token may change only that token's gradient, even in GSPO, whose ratio belongs to the
    whole rollout.
    """
    rollout = WeightedRollout(
        completion_ids=np.arange(3, dtype=np.int32),
        loss_mask=np.ones(3, dtype=bool),
        behavior_logprobs=np.array([-1, -1, -4], dtype=np.float32),
        advantages=np.full(3, 1.0),
        weight=1 / 3,
    )
    (batch,) = build_micro_batches([WeightedGroup(prompt_ids=np.array([7]), rollouts=(rollout,))], micro_batch_tokens=9)
    learner = torch.full((3,), -1.0, requires_grad=True)
    settings: dict[str, Any] = {"name": "gspo", "old_policy": "proximal", "correction": correction}
    loss, _ = StepLoss(ObjectiveConfig(**settings))(batch, learner)
    (gradient,) = torch.autograd.grad(loss, learner)
    assert gradient.tolist() == pytest.approx([-1 / 3, -1 / 3, third])


def test_settings_that_need_the_steps_first_policy() -> None:
    needs = [
        ObjectiveConfig(name="decoupled_ppo"),
        ObjectiveConfig(old_policy="proximal"),
        ObjectiveConfig(sequence_veto=1e-4),
    ]
    assert all(StepLoss(settings).needs_proximal for settings in needs)
    assert not any(StepLoss(ObjectiveConfig(name=name)).needs_proximal for name in ("grpo", "gspo", "aipo", "cispo"))
