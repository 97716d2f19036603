"""Adapters on small random base models of other families, and on a real pretrained model (`real_model`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness.plain_losses import ModelsBench, a_request, computed, largest_error, peft_of, reference
from echo_hub.config.section import Precision
from echo_hub.config.sections import HubConfig
from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner.models import files
from echo_hub.learner.models.adapters import LoraTensors
from echo_hub.learner.models.worker import of_models
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.tenants.refusal import Refusal
from echo_hub.tenants.requests import AdamStep, LoraWish, LossFunction
from echo_shared.errors import LearnerError
from echo_shared.sampling.interface import GroupRequest
from echo_shared.sampling.torch_sampler import sample_groups
from tests.families import FAMILIES


def bench_of(base_dir: Path, precision: Precision = "float32") -> ModelsBench:
    config = HubConfig(learner=LearnerConfig(threads=1, device="cpu", precision=precision))
    policy = Policy.load(of_models(LearnerSettings.of_run(config, base_dir=base_dir, stop_ids=(1,))))
    return ModelsBench.of_policy(policy)


@pytest.mark.parametrize("family", ["gemma2", "granite", "qwen3_moe", "lfm2"])
def test_other_families_are_computed_as_by_their_own_code(family: str, tmp_path: Path) -> None:
    """These families have capped or scaled logits, experts, or layers that do not allow packed sequences."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).save_pretrained(tmp_path / "base")
    bench = bench_of(tmp_path / "base")
    model = bench.model(b_scale=0.1)
    peft_model = peft_of(bench, model, tmp_path / "adapter", tmp_path / "base")
    for loss, targets in ((LossFunction.PPO, 0), (LossFunction.CROSS_ENTROPY, 3)):
        request = a_request(bench, loss, targets=targets, count=3)
        model.drop_gradient()
        total, _, gradients = reference(peft_model, request)
        result, found = computed(bench, model, request)
        assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5, abs=1e-5)
        assert largest_error(found, gradients) < 2e-5


@pytest.mark.slow
def test_the_real_model_in_float32(real_model: Path, tmp_path: Path) -> None:
    bench = bench_of(real_model)
    model = bench.model(rank=8, b_scale=0.02)
    request = a_request(bench, LossFunction.IMPORTANCE_SAMPLING, count=2)
    total, logprobs, gradients = reference(peft_of(bench, model, tmp_path / "adapter", real_model), request)
    result, found = computed(bench, model, request)
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    for of_datum, expected in zip(result.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(of_datum, expected.numpy(), atol=1e-4)
    assert largest_error(found, gradients) < 1e-4


@pytest.mark.slow
def test_the_real_model_in_bfloat16_learns_and_exports(real_model: Path, tmp_path: Path) -> None:
    bench = bench_of(real_model, "bfloat16")
    model = bench.model(rank=8)
    request = a_request(bench, LossFunction.CROSS_ENTROPY, count=2)
    exact = bench_of(real_model)
    of_exact, _ = computed(exact, exact.model(rank=8), request)
    first, _ = computed(bench, model, request)
    for found, expected in zip(first.logprobs, of_exact.logprobs, strict=True):
        assert np.abs(found - expected).mean() < 0.02 * np.abs(expected).mean()
    assert all(weight.dtype == torch.float32 for weight in model.adapter.weights.values())
    model.step(AdamStep(learning_rate=1e-3))
    second, _ = computed(bench, model, request)
    assert second.metrics["loss:sum"] < first.metrics["loss:sum"] - 1
    files.export(model, bench.seat, tmp_path / "v", probe=bench.probe)
    bench.seat.hold(bench.seat.read(tmp_path / "v"))
    group = GroupRequest(
        lease_id=1,
        group_id=1,
        indices=(0, 1),
        prompt_ids=request.data[0].input_ids,
        seed=1,
        policy_version=0,
        temperature=1.0,
        max_tokens=4,
        stop_ids=(),
    )
    with bench.policy.autocast():
        drawn = list(sample_groups(bench.policy.model, [group]))
    assert [len(rollout.completion_ids) for rollout in drawn] == [4, 4]


def test_a_fresh_adapter_changes_nothing_and_follows_from_its_seed(bench: ModelsBench) -> None:
    first, again, other = (bench.seat.fresh(LoraWish(rank=3, seed=seed)) for seed in (1, 1, 2))
    for name, weight in first.weights.items():
        assert torch.equal(weight, again.weights[name])
        if ".lora_B." in name:
            assert not weight.any()
        else:
            limit = weight.shape[1] ** -0.5
            assert not torch.equal(weight, other.weights[name])
            assert 0.9 * limit < float(weight.detach().abs().max()) <= limit
    assert first.scaling == 32 / 3


def test_layers_are_those_of_the_wish(bench: ModelsBench) -> None:
    attention = bench.seat.fresh(LoraWish(rank=1, seed=0, mlp=False))
    mlp = bench.seat.fresh(LoraWish(rank=1, seed=0, attention=False, unembed=False))
    both = bench.seat.fresh(LoraWish(rank=1, seed=0))
    assert all(".self_attn." in name for name in attention.weights)
    assert all(".mlp." in name for name in mlp.weights)
    assert {*attention.weights, *mlp.weights} == set(both.weights)
    for wish in (LoraWish(attention=False, mlp=False, seed=0), LoraWish(rank=0, seed=0), LoraWish(rank=9_999, seed=0)):
        with pytest.raises(Refusal):
            bench.seat.fresh(wish)


def test_weights_that_do_not_fit_the_base_are_refused(bench: ModelsBench) -> None:
    adapter = bench.model(rank=2).adapter
    weights = {name: weight.detach() for name, weight in adapter.weights.items()}
    a, b = list(weights)[:2]
    for broken in (
        {**weights, a: weights[a][:, 1:]},
        {**weights, b: weights[b][1:]},
        {**weights, a: weights[a][:1]},
        {**weights, "base_model.model.lm_head.lora_A.weight": weights[a]},
        {name: weight for name, weight in weights.items() if name != b},
    ):
        with pytest.raises(LearnerError, match="does not fit"):
            bench.seat.of_weights(broken, scaling=1.0, trained=True)
    assert isinstance(bench.seat.of_weights(weights, scaling=1.0, trained=True), LoraTensors)


def test_an_adapter_that_is_no_adapter_cannot_be_read(bench: ModelsBench, tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="cannot be read"):
        bench.seat.read(tmp_path)
