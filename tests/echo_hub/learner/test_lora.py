from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedConfig

from echo_hub.learner import lora

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Two(nn.Module):
    """Two linear layers, one with a bias."""

    config = PreTrainedConfig()

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12, dtype=torch.float64)
        self.down = nn.Linear(12, 8, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(self.up(x).tanh())
        return down


def make(*, ours: bool) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["up", "down"], lora_dropout=0.0, bias="none")
    if ours:
        lora.use_in(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(Two(), config, autocast_adapter_dtype=False).double()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            with torch.no_grad():
                parameter.normal_(generator=generator)
    return model.eval()


@pytest.mark.parametrize("input_gradient", [True, False])
def test_values_and_gradients_are_those_of_peft(input_gradient: bool) -> None:
    found = []
    for ours in (True, False):
        model = make(ours=ours)
        x = X.clone().requires_grad_(input_gradient)
        y = model(x)
        y.square().sum().backward()
        assert (x.grad is not None) == input_gradient
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        found.append((y.detach(), x.grad, gradients))
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert len(found[0][2]) == 4
    torch.testing.assert_close(found[0], found[1], atol=1e-10, rtol=1e-10)


def test_gradients_are_those_of_finite_differences() -> None:
    layer = make(ours=True).base_model.model.up
    assert isinstance(layer, lora.LoraLinear)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = X[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, a, b: layer(x), (x, a, b))


def test_merged_it_computes_the_same_until_it_is_merged_anew() -> None:
    model = make(ours=True)
    before = model(X).detach()
    base = model.base_model.model.up.base_layer.weight.clone()
    lora.merge(model)
    torch.testing.assert_close(model(X), before, atol=1e-12, rtol=1e-12)
    with torch.no_grad():
        model.base_model.model.up.lora_B["default"].weight.zero_()
    torch.testing.assert_close(model(X), before, atol=1e-12, rtol=1e-12)
    lora.merge(model)
    after = model(X)
    assert not torch.allclose(after, before)
    assert torch.equal(model.base_model.model.up.base_layer.weight, base)
    assert lora.merged_bytes(model) == (12 * 8 + 8 * 12) * 8
    with model.disable_adapter():
        assert not torch.allclose(model(X), after)


def test_the_adapter_can_be_switched_off() -> None:
    model = make(ours=True)
    torch.manual_seed(0)
    plain = Two()
    with model.disable_adapter():
        torch.testing.assert_close(model(X), plain(X))
    assert not torch.allclose(model(X), plain(X))


def test_a_merged_adapter_counts_once() -> None:
    model = make(ours=True)
    before = model(X)
    model.merge_adapter()
    torch.testing.assert_close(model(X), before)


def test_only_the_input_and_its_projection_are_kept() -> None:
    layer = make(ours=True).base_model.model.up
    kept: list[tuple[int, ...]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(X.clone().requires_grad_())
    assert sorted(kept) == [(15, 3), (15, 8)]
