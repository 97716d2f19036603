"""Passes and steps of a tenant's model give what plain transformers, PEFT and torch give. The plain computation is
written here a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.harness.plain_losses import CONFIGS, ModelsBench, a_request, computed, largest_error, peft_of, reference
from echo_hub.learner.models import training
from echo_hub.learner.models.adapters import LoraTensors
from echo_hub.learner.models.training import Pass, PassSizes
from echo_hub.tenants.refusal import Refusal
from echo_hub.tenants.requests import AdamStep, Datum, ForwardBackward, LossFunction
from echo_shared.errors import LearnerError


@pytest.mark.parametrize("loss", list(LossFunction))
def test_each_loss_and_its_gradient_are_those_of_plain_torch(
    bench: ModelsBench, loss: LossFunction, tmp_path: Path
) -> None:
    model = bench.model(b_scale=0.3)
    request = a_request(bench, loss)
    total, logprobs, gradients = reference(peft_of(bench, model, tmp_path / "adapter"), request)
    result, found = computed(bench, model, request, tokens=24)
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for of_datum, expected in zip(result.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(of_datum, expected.numpy(), atol=1e-5)
    assert largest_error(found, gradients) < 1e-5


def test_weights_and_bounds_of_each_token_are_honoured(bench: ModelsBench, tmp_path: Path) -> None:
    model, rng = bench.model(b_scale=0.3), np.random.default_rng(3)
    peft_model = peft_of(bench, model, tmp_path / "adapter")
    for loss in (LossFunction.PPO, LossFunction.CISPO, LossFunction.DRO, LossFunction.GSPO):
        data = []
        for datum in a_request(bench, loss, seed=4).data:
            more = {"weights": rng.uniform(-1, 2, len(datum.input_ids)).astype(np.float32)}
            if loss is not LossFunction.DRO:
                more["clip_low_threshold"] = rng.uniform(0.1, 0.9, len(datum.input_ids)).astype(np.float32)
                more["clip_high_threshold"] = rng.uniform(1.0, 2.0, len(datum.input_ids)).astype(np.float32)
            data.append(replace(datum, loss_inputs={**datum.loss_inputs, **more}))
        request = ForwardBackward(data=tuple(data), loss=loss, config=CONFIGS[loss])
        model.drop_gradient()
        total, _, gradients = reference(peft_model, request)
        result, found = computed(bench, model, request)
        assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
        assert largest_error(found, gradients) < 1e-5, loss


def test_several_targets_of_a_position_are_summed(bench: ModelsBench, tmp_path: Path) -> None:
    model = bench.model(b_scale=0.3)
    wide, narrow = (a_request(bench, LossFunction.CROSS_ENTROPY, seed=seed, targets=k) for seed, k in ((1, 6), (2, 0)))
    request = replace(wide, data=wide.data + narrow.data)
    total, logprobs, gradients = reference(peft_of(bench, model, tmp_path / "adapter"), request)
    result, found = computed(bench, model, request)
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for of_datum, expected in zip(result.logprobs, logprobs, strict=True):
        assert of_datum.shape == tuple(expected.shape)
        np.testing.assert_allclose(of_datum, expected.numpy(), atol=1e-5)
    assert largest_error(found, gradients) < 1e-5


@pytest.mark.parametrize("loss", [LossFunction.IMPORTANCE_SAMPLING, LossFunction.DRO, LossFunction.CROSS_ENTROPY])
def test_the_gradient_is_that_of_finite_differences(bench: ModelsBench, loss: LossFunction) -> None:
    """Only losses whose gradient is the derivative of their value: PPO, CISPO and GSPO stop the gradient in
    some terms.
    """
    model, request = bench.model(b_scale=0.05), a_request(bench, loss, count=2)
    _, gradients = computed(bench, model, request)
    name, weight = max(model.adapter.weights.items(), key=lambda item: float(gradients[item[0]].abs().max()))
    direction = gradients[name] / gradients[name].norm()
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(direction, alpha=sign * 1e-3)
        values.append(computed(bench, model, replace(request, forward_only=True))[0].metrics["loss:sum"])
        with torch.no_grad():
            weight.sub_(direction, alpha=sign * 1e-3)
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(float(gradients[name].norm()), rel=5e-3)


def test_gradients_add_up_until_a_step_and_forward_only_adds_none(bench: ModelsBench) -> None:
    model, alone = bench.model(b_scale=0.3), bench.model(b_scale=0.3)
    first, second = (a_request(bench, LossFunction.CROSS_ENTROPY, seed=seed) for seed in (1, 2))
    computed(bench, model, first)
    _, before = computed(bench, model, replace(second, forward_only=True))
    _, both = computed(bench, model, second)
    _, of_first = computed(bench, alone, first)
    assert largest_error(before, of_first) == 0
    alone.drop_gradient()
    _, of_second = computed(bench, alone, second)
    assert largest_error(both, {name: of_first[name] + of_second[name] for name in of_first}) < 1e-6
    model.step(AdamStep())
    assert all(weight.grad is None for weight in model.adapter.weights.values())


def test_packing_changes_only_rounding_and_repeats_give_the_same_bits(bench: ModelsBench) -> None:
    request = a_request(bench, LossFunction.PPO, count=9)
    results = [computed(bench, bench.model(b_scale=0.3), request, tokens=tokens) for tokens in (1_000, 30, 1, 30)]
    assert largest_error(results[1][1], results[0][1]) < 1e-5
    assert largest_error(results[2][1], results[0][1]) < 1e-5
    assert all(torch.equal(results[1][1][name], results[3][1][name]) for name in results[1][1])


def test_ranks_and_layers_may_differ_between_models(bench: ModelsBench, tmp_path: Path) -> None:
    request = a_request(bench, LossFunction.CROSS_ENTROPY)
    # The adapter's scale is 32 / rank, so these adapters have the same size. A larger one of rank 1 multiplies the
    # rounding of plain PyTorch, too: to 3e-4 of its gradient.
    models = [bench.model(rank=rank, seed=rank, b_scale=0.3 * rank / 8) for rank in (1, 8, 3)]
    attention = {name: weight for name, weight in models[1].adapter.weights.items() if ".self_attn." in name}
    models.append(replace(models[1], adapter=LoraTensors(weights=attention, scaling=models[1].adapter.scaling)))
    for number, model in enumerate(models):
        model.drop_gradient()
        total, _, gradients = reference(peft_of(bench, model, tmp_path / str(number)), request)
        result, found = computed(bench, model, request)
        assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
        assert largest_error(found, gradients) < 1e-5


STEPS = (
    AdamStep(learning_rate=1e-2, eps=1e-8),
    AdamStep(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-8, weight_decay=0.1),
    AdamStep(learning_rate=2e-3, grad_clip_norm=0.5),
    AdamStep(learning_rate=1e-3),
)


def test_steps_are_those_of_torchs_adamw(bench: ModelsBench, tmp_path: Path) -> None:
    """Each step may bring other parameters of AdamW. Its bias corrections depend on the number of steps."""
    model = bench.model(b_scale=0.3)
    peft_model = peft_of(bench, model, tmp_path / "adapter")
    weights = {
        name.replace(".default.", "."): weight for name, weight in peft_model.named_parameters() if weight.requires_grad
    }
    optimizer = torch.optim.AdamW(weights.values(), foreach=False, fused=False)
    for number, step in enumerate(STEPS):
        request = a_request(bench, LossFunction.CROSS_ENTROPY, seed=number)
        computed(bench, model, request)
        metrics = model.step(step)
        reference(peft_model, request)
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), step.grad_clip_norm or float("inf"))
        assert metrics["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-4)
        for group in optimizer.param_groups:
            group.update(
                lr=step.learning_rate,
                betas=(step.beta1, step.beta2),
                eps=step.eps,
                weight_decay=step.weight_decay,
            )
        optimizer.step()
        _same(model.adapter.weights, weights, 2e-4 if step.eps < 1e-10 else 2e-5)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(model.adapter.weights[name])
    assert model.steps == len(STEPS)


def _same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float) -> None:
    for name, weight in found.items():
        torch.testing.assert_close(weight.detach(), expected[name].detach(), atol=within, rtol=0)


def test_a_step_without_a_pass_has_the_gradient_zero(bench: ModelsBench) -> None:
    model = bench.model(b_scale=0.3)
    before = {name: weight.detach().clone() for name, weight in model.adapter.weights.items()}
    assert model.step(AdamStep()) == {"grad_norm:mean": 0.0}
    assert all(torch.equal(weight, before[name]) for name, weight in model.adapter.weights.items())


def test_equal_gradients_give_torchs_own_step_exactly(bench: ModelsBench) -> None:
    model = bench.model(b_scale=0.3)
    ours = list(model.adapter.weights.values())
    plain = [weight.detach().clone().requires_grad_() for weight in ours]
    optimizer = torch.optim.AdamW(plain, foreach=False, fused=False)
    generator = torch.Generator().manual_seed(0)
    for step in STEPS:
        for mine, other in zip(ours, plain, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        torch.nn.utils.clip_grad_norm_(plain, step.grad_clip_norm or float("inf"))
        for group in optimizer.param_groups:
            group.update(
                lr=step.learning_rate, betas=(step.beta1, step.beta2), eps=step.eps, weight_decay=step.weight_decay
            )
        optimizer.step()
        model.step(step)
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), atol=1e-6, rtol=0)


def test_a_pass_that_fails_leaves_the_gradient_alone(bench: ModelsBench) -> None:
    model = bench.model(b_scale=0.3)
    good = a_request(bench, LossFunction.IMPORTANCE_SAMPLING)
    _, before = computed(bench, model, good)
    broken = replace(good.data[0], loss_inputs={**good.data[0].loss_inputs})
    broken.loss_inputs["logprobs"][-1] = -1e4
    bad = replace(good, data=(*good.data[1:], broken))
    with pytest.raises(Refusal, match="not finite"):
        computed(bench, model, bad, tokens=8)
    assert all(
        torch.equal(weight.grad, before[name])
        for name, weight in model.adapter.weights.items()
        if weight.grad is not None
    )


def test_memory_that_is_too_small_halves_the_micro_batches(bench: ModelsBench, monkeypatch: pytest.MonkeyPatch) -> None:
    request, sizes = a_request(bench, LossFunction.PPO, count=8), PassSizes(tokens=1_000)
    _, expected = computed(bench, bench.model(b_scale=0.3), request)
    compute, tried = Pass._compute, list[int]()

    def limited(of_pass: Pass, data: Sequence[Datum], found: Any) -> None:
        tried.append(sum(len(datum.input_ids) for datum in data))
        compute(of_pass, data, found)
        if tried[-1] > 40:
            raise MemoryError("40 tokens fit")

    monkeypatch.setattr(training.Pass, "_compute", limited)
    model = bench.model(b_scale=0.3)
    *_, result = Pass(bench.policy, bench.seat, model, request, sizes).run()
    assert result is not None and len(result.logprobs) == 8 and sizes.tokens < 1_000
    found = {name: weight.grad for name, weight in model.adapter.weights.items() if weight.grad is not None}
    assert largest_error(found, expected) < 1e-5 and max(tried) > 40


def test_gradient_checkpointing_is_turned_on_if_a_single_datum_does_not_fit(
    bench: ModelsBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, compute = a_request(bench, LossFunction.PPO, count=1), Pass._compute
    _, expected = computed(bench, bench.model(b_scale=0.3), request)

    def limited(of_pass: Pass, data: Sequence[Datum], found: Any) -> None:
        compute(of_pass, data, found)
        if not bench.policy.checkpoints:
            raise MemoryError("all activations do not fit")

    monkeypatch.setattr(training.Pass, "_compute", limited)
    monkeypatch.setattr(bench.policy, "checkpoints", False)
    model = bench.model(b_scale=0.3)
    with pytest.raises(LearnerError, match="too little memory for a single datum"):
        list(Pass(bench.policy, bench.seat, model, request, PassSizes(tokens=100)).run())
    sizes = PassSizes(tokens=100, may_checkpoint=True)
    *_, result = Pass(bench.policy, bench.seat, model, request, sizes).run()
    found = {name: weight.grad for name, weight in model.adapter.weights.items() if weight.grad is not None}
    assert result is not None and largest_error(found, expected) < 1e-6
