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
def test_values_and_gradients_equal_pefts(input_gradient: bool) -> None:
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


def test_gradients_equal_finite_differences() -> None:
    layer = make(ours=True).base_model.model.up
    assert isinstance(layer, lora.LoraLinear)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = X[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, a, b: layer(x), (x, a, b))


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {
        name.replace(".default.", "."): parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def test_several_adapters_compute_each_its_own_tokens() -> None:
    model = make(ours=True)
    other = {name: 2.0 * weight for name, weight in weights_of(model).items()}
    none = {name: 0.0 * weight for name, weight in weights_of(model).items()}
    x = X[:1]
    own = model(x).detach()
    torch.manual_seed(0)
    expected = torch.cat([Two()(x)[:, :1], computed_by(other, x)[:, 1:4], own[:, 4:]], dim=1)
    with torch.no_grad(), lora.computing_by(lora.layers(model), [(none, 1), (other, 3), (weights_of(model), 1)]):
        torch.testing.assert_close(model(x), expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(model(x), own, atol=0, rtol=0)


def computed_by(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    model = make(ours=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(weights[name.replace(".default.", ".")])
    found: torch.Tensor = model(x).detach()
    return found


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
    assert sorted(kept) == [(3, 5, 8), (15, 3)]
