from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from echo_hub.learner import gated_mlp, lora

SHAPE = {"hidden_size": 32, "intermediate_size": 192}
MLPS: dict[str, Any] = {
    "Qwen3": lambda: Qwen3MLP(Qwen3Config(**SHAPE)),
    "Llama with biases": lambda: LlamaMLP(LlamaConfig(**SHAPE, mlp_bias=True)),
    "Gemma 2": lambda: Gemma2MLP(Gemma2Config(**SHAPE)),
}
ALL = ("gate_proj", "up_proj", "down_proj")


class Body(nn.Module):
    config = PreTrainedConfig()

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(make(), make())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def adapted(make: Any, targets: Sequence[str], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=list(targets), lora_dropout=0.0, bias="none")
    lora.use_in(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(Body(make).to(dtype), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return model.eval()


def computed(model: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], int]:
    """Return outputs, all gradients, and the bytes (weights excluded) that are kept for the backward pass."""
    kept: dict[int, int] = {}
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    x = torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model(x)
    y.float().square().mean().backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"outputs": y.detach(), "input": x.grad, **gradients}, sum(kept.values())


@pytest.mark.parametrize("targets", [ALL, ("gate_proj", "up_proj"), ("down_proj",)], ids=", ".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MLPS)
def test_all_is_the_same_to_the_bit_and_less_is_kept(kind: str, dtype: torch.dtype, targets: Sequence[str]) -> None:
    model = adapted(MLPS[kind], targets, dtype)
    expected, bytes_before = computed(model, dtype)
    model.zero_grad()
    assert gated_mlp.use_in(model) == 2
    found, bytes_after = computed(model, dtype)
    assert expected.keys() == found.keys() and len(found) == 2 + 4 * len(targets)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert bytes_after < (0.72 if "down_proj" in targets else 0.8) * bytes_before


def test_with_adapters_off_or_several_it_computes_the_same() -> None:
    model = adapted(MLPS["Qwen3"], ALL, torch.float32)
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    weights = {name.replace(".default.", "."): p.detach() for name, p in model.named_parameters() if p.requires_grad}
    other = {name: 2.0 * weight for name, weight in weights.items()}

    @torch.no_grad()
    def outputs() -> list[Tensor]:
        with model.disable_adapter():
            alone = model(x)
        with lora.computing_by(lora.layers(model), [(weights, 2), (other, 4)]):
            return [alone, model(x), model(x[:, :2])[:, :2]]

    before = outputs()
    gated_mlp.use_in(model)
    assert all(map(torch.equal, before, outputs()))


class Scaled(Qwen3MLP):
    """An MLP with the same form but another forward pass; `gated_mlp.use_in` must not replace it."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 2.0 * super().forward(x)
        return y


def test_other_modules_are_left_unchanged() -> None:
    model = adapted(lambda: Scaled(Qwen3Config(**SHAPE)), ALL, torch.float32)
    x = torch.randn(1, 3, 32)
    expected = model(x)
    assert gated_mlp.use_in(model) == 0
    assert torch.equal(model(x), expected)
