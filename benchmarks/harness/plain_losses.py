"""The losses of tenants (users of the Tinker API) in plain transformers, PEFT and PyTorch, for comparison with the
hub's own passes.

Tests and the benchmark of the Tinker API compare `reference`, which implements the losses a second time, with
`computed`, which runs the hub's code.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.harness.site import RunFailed
from echo_hub.config.sections import HubConfig
from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner.models.adapters import AdapterSeat
from echo_hub.learner.models.probing import AdapterProbe
from echo_hub.learner.models.training import Pass, PassSizes, TrainedModel
from echo_hub.learner.models.worker import of_models
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.run.base_files import resolve_base
from echo_hub.tenants.requests import Datum, ForwardBackward, LoraWish, LossFunction, PassResult

CONFIGS: Final[Mapping[LossFunction, Mapping[str, float]]] = {
    LossFunction.CROSS_ENTROPY: {},
    LossFunction.IMPORTANCE_SAMPLING: {},
    LossFunction.PPO: {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    LossFunction.CISPO: {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
    LossFunction.DRO: {"beta": 0.05},
    LossFunction.GSPO: {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelsBench:
    """A loaded base model, its place for adapters (`seat`), and the check of published adapters (`probe`)."""

    policy: Policy
    seat: AdapterSeat
    probe: AdapterProbe

    def model(self, *, rank: int = 4, seed: int = 1, b_scale: float = 0.0) -> TrainedModel:
        """Return a new model. With `b_scale` above 0 the LoRA matrices B are random, so that the matrices A get a
        gradient.
        """
        wish = LoraWish(rank=rank, seed=seed)
        model = TrainedModel.of(wish, self.seat.fresh(wish))
        generator = torch.Generator().manual_seed(seed)
        for name, weight in model.adapter.weights.items():
            if b_scale and ".lora_B." in name:
                with torch.no_grad():
                    weight.copy_(torch.randn(weight.shape, generator=generator) * b_scale)
        return model

    @classmethod
    def of(cls, settings: LearnerSettings) -> ModelsBench:
        return cls.of_policy(Policy.load(of_models(settings)))

    @classmethod
    def of_policy(cls, policy: Policy) -> ModelsBench:
        seat = AdapterSeat(policy)
        return cls(policy=policy, seat=seat, probe=AdapterProbe(policy, seat))


def tiny_settings() -> LearnerSettings:
    """Return the settings of a run with the built-in base, on one thread of the CPU."""
    config = HubConfig(learner=LearnerConfig(threads=1, device="cpu"))
    return LearnerSettings.of_run(config, base_dir=resolve_base("builtin:tiny"), stop_ids=(1,))


def make_datum(
    rng: np.random.Generator, length: int, loss: LossFunction, *, vocab_size: int, targets: int = 0
) -> Datum:
    """Return random data for a loss. The first third of the positions is the prompt: its advantages or weights
    are 0.
    """
    prompt = length // 3
    inputs: dict[str, Any]
    shape = (length, targets) if targets else (length,)
    ids = rng.integers(0, vocab_size, shape)
    drawn = np.arange(length) >= prompt
    if loss is LossFunction.CROSS_ENTROPY:
        weights = rng.normal(size=shape).astype(np.float32)
        weights[:prompt] = 0
        inputs = {"target_tokens": ids, "weights": weights}
    else:
        inputs = {
            "target_tokens": ids,
            "logprobs": np.where(drawn, rng.uniform(-6, -1, length), 0).astype(np.float32),
            "advantages": np.where(drawn, rng.normal(size=length), 0).astype(np.float32),
        }
    if loss is LossFunction.GSPO:
        inputs["sequence_ratio_mask"] = drawn.astype(np.float32)
    return Datum(input_ids=rng.integers(0, vocab_size, length).astype(np.int32), loss_inputs=inputs)


def computed(
    bench: ModelsBench, model: TrainedModel, request: ForwardBackward, *, tokens: int = 1_000
) -> tuple[PassResult, dict[str, Tensor]]:
    """Run the request by the hub's code. Return the result of the pass, and the model's gradient by weight name."""
    *units, result = Pass(bench.policy, bench.seat, model, request, PassSizes(tokens=tokens)).run()
    if result is None or any(units):
        raise RunFailed("a pass gave no result, or more than one")
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in model.adapter.weights.items()
    }
    return result, gradients


def reference(
    peft_model: Any, request: ForwardBackward, *, autograd: bool = True
) -> tuple[float, list[Tensor], dict[str, Tensor]]:
    """Compute the losses of the request by their formulas in plain PyTorch, one datum (training example) at a time.
    Return the loss, the log-probabilities of each datum, and the gradient by weight name.
    """
    peft_model.zero_grad(set_to_none=True)
    total, found = torch.zeros((), dtype=torch.float64), []
    for datum in request.data:
        logits = peft_model(input_ids=torch.from_numpy(datum.input_ids.astype(np.int64))[None]).logits[0].float()
        inputs = {name: torch.from_numpy(values) for name, values in datum.loss_inputs.items()}
        ids = inputs["target_tokens"]
        every = logits.log_softmax(-1)
        p = every.gather(1, ids if ids.ndim == 2 else ids[:, None]).reshape(ids.shape)
        found.append(p.detach())
        total = total + plain_loss(request.loss, p, inputs, request.config)
    if autograd:
        total.backward()
    gradients = {
        name.replace(".default.", "."): torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in peft_model.named_parameters()
        if weight.requires_grad
    }
    return float(total.detach()), found, gradients


def plain_loss(loss: LossFunction, p: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    w = inputs.get("weights", torch.ones_like(p))
    if loss is LossFunction.CROSS_ENTROPY:
        return -(w * p).sum()
    q, a = inputs["logprobs"], inputs["advantages"]
    r = (p - q).exp()
    low = inputs.get("clip_low_threshold", config.get("clip_low_threshold", 0.0))
    high = inputs.get("clip_high_threshold", config.get("clip_high_threshold", 0.0))
    if loss is LossFunction.IMPORTANCE_SAMPLING:
        return -(w * r * a).sum()
    if loss is LossFunction.PPO:
        return -(w * torch.min(r * a, r.clamp(low, high) * a)).sum()
    if loss is LossFunction.CISPO:
        return -(w * r.detach().clamp(low, high) * p * a).sum()
    if loss is LossFunction.DRO:
        return -(w * (p * a - 0.5 * float(config["beta"]) * (p - q).square())).sum()
    mask = inputs["sequence_ratio_mask"]
    s = ((mask * (p - q)).sum() / mask.sum()).exp().detach()
    each = s * (p - p.detach()).exp()
    return -(w * torch.min(each * a, each.clamp(low, high) * a)).sum()


def peft_of(bench: ModelsBench, model: TrainedModel, directory: Path, base: Path | None = None) -> Any:
    """Return the model as a PEFT model of plain transformers."""
    directory.mkdir(exist_ok=True)
    bench.seat.write(model.adapter.weights, directory)
    plain = AutoModelForCausalLM.from_pretrained(base or resolve_base("builtin:tiny"), dtype=torch.float32)
    with warnings.catch_warnings():
        # PEFT reads an attribute that transformers has renamed.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        return PeftModel.from_pretrained(plain, directory, is_trainable=True).eval()


def a_request(
    bench: ModelsBench, loss: LossFunction, *, seed: int = 0, targets: int = 0, count: int = 5
) -> ForwardBackward:
    rng = np.random.default_rng(seed)
    data = [
        make_datum(rng, int(rng.integers(3, 20)), loss, vocab_size=bench.policy.vocab_size, targets=targets)
        for _ in range(count)
    ]
    return ForwardBackward(data=tuple(data), loss=loss, config=CONFIGS[loss])


def largest_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest error of a gradient, relative to the gradient's largest value."""
    if found.keys() != expected.keys():
        raise RunFailed(f"other weights have a gradient: {found.keys() ^ expected.keys()}")
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(float((found[name] - expected[name]).abs().max()) for name in found) / largest
