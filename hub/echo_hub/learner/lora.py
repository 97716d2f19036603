"""A linear layer with LoRA whose base is frozen, computed in place.

    y = W x + b + s B A x;   dx = Wᵀ dy + Aᵀ dh,   dA = dh xᵀ,   dB = s dy (A x)ᵀ,   dh = s Bᵀ dy

Source: LoRA (arXiv 2106.09685, eq. 3). PEFT's own layer writes B A x, its scaled copy and the sum to memory one after
the other, and two gradients of x that are then added; here each is added into what is there already. Besides x, only
A x [tokens, rank] is kept for the backward pass: about a third less for a whole model, in the same time.

Who only computes, and much by one adapter, may have W + s B A added up first (`merge`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def use_in(config: LoraConfig) -> None:
    """Has PEFT make these layers, instead of its own, where the base model has plain linear ones."""
    config._register_custom_module({nn.Linear: LoraLinear})


class LoraLinear(lora.Linear):
    """PEFT's layer with one adapter, without dropout; what PEFT does with it beside the computation is unchanged."""

    merged_OI: Tensor | None = None
    """See `merge`."""

    @property
    def linear(self) -> nn.Linear:
        """The base's layer."""
        return cast("nn.Linear", self.base_layer)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's outputs [..., O] for its inputs `x` [..., I]."""
        if self.disable_adapters or self.merged:
            result: Tensor = self.base_layer(x, *args, **kwargs)
            return result
        base = self.linear
        if self.merged_OI is not None:
            return nn.functional.linear(x.to(self.merged_OI.dtype), self.merged_OI, base.bias)
        (name,) = self.active_adapters
        computed: Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]
            x, base.weight, base.bias, self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
        )
        return computed


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Adds the adapter, as it is now, to the weights of all such layers, each in a matrix beside its base. They compute
    with that from then on, without a graph, and see a change of the adapter only when this is called again."""
    for layer in _layers(model):
        (name,) = layer.active_adapters
        weight = layer.linear.weight
        if layer.merged_OI is None:
            layer.merged_OI = torch.empty_like(weight)
        torch.add(weight, layer.get_delta_weight(name).to(weight.dtype), out=layer.merged_OI)


def merged_bytes(model: nn.Module) -> int:
    """What `merge` takes beside the model."""
    return sum(layer.linear.weight.nbytes for layer in _layers(model))


def _layers(model: nn.Module) -> Iterator[LoraLinear]:
    return (module for module in model.modules() if isinstance(module, LoraLinear))


class _LoraLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
    ) -> Tensor:
        """x [..., I], weight [O, I], bias [O], lora_a [R, I] and lora_b [O, R] to outputs [..., O]."""
        x_NI = x.to(weight.dtype).flatten(0, -2)
        a_RI, b_OR = lora_a.to(weight.dtype), lora_b.to(weight.dtype)
        h_NR = x_NI @ a_RI.T
        y_NO = nn.functional.linear(x_NI, weight, bias).addmm_(h_NR, b_OR.T, alpha=scaling)
        ctx.save_for_backward(x_NI, h_NR, weight, lora_a, lora_b)
        ctx.scaling = scaling
        y: Tensor = y_NO.unflatten(0, x.shape[:-1])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, h_NR, weight, lora_a, lora_b = ctx.saved_tensors
        (dy,) = gradients
        dy_NO = dy.flatten(0, -2)
        a_RI, b_OR = lora_a.to(weight.dtype), lora_b.to(weight.dtype)
        dh_NR = (dy_NO @ b_OR).mul_(ctx.scaling)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy_NO @ weight).addmm_(dh_NR, a_RI).unflatten(0, dy.shape[:-1])
        da = (dh_NR.T @ x_NI).to(lora_a.dtype)
        db = (dy_NO.T @ h_NR).to(lora_b.dtype).mul_(ctx.scaling)
        return dx, None, None, da, db, None
