"""The gated MLP of Llama, Qwen, Gemma and similar models, with less memory for the backward pass.

    y = down(act(gate(x)) * up(x))

x is the layer's input, act the activation function, and gate, up and down are linear layers. Autograd would keep four
tensors of shape [tokens, intermediate]. Here two of them, act(gate(x)) and its product with up(x), are recomputed from
the other two, which needs no matrix product. A small model then needs about a third less memory in all, with
bit-identical values and gradients. Source: GLU variants (arXiv 2002.05202). Recomputing cheap tensors is selective
activation recomputation (arXiv 2205.05198, section 5).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echo_hub.learner import lora

_PARTS: Final = ("gate_proj", "up_proj", "down_proj", "act_fn")


def use_in(model: nn.Module) -> int:
    """Replace the forward pass of every gated MLP in `model`, and return their number. Other modules stay unchanged.

    The weights must be in memory and not sharded yet.
    """
    found = [module for module in model.modules() if all(hasattr(module, part) for part in _PARTS)]
    gated = {kind for kind, module in {type(module): module for module in found}.items() if _is_gated(module)}
    taken = [module for module in found if type(module) in gated]
    for module in taken:
        module.forward = partial(_forward, module)
    return len(taken)


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    """Return True if the module computes the same as `_forward`, tested on a random token."""
    weight = module.gate_proj.weight
    if not weight.dtype.is_floating_point:  # A quantised layer computes only on its own device.
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, module.gate_proj.in_features, generator=generator).to(weight)
    return torch.equal(module(x), _forward(module, x))


def _forward(module: Any, x: Tensor) -> Tensor:
    gate, up, down, act = module.gate_proj(x), module.up_proj(x), module.down_proj, module.act_fn
    adapter = down.adapter if isinstance(down, lora.LoraLinear) else None
    computed: Tensor
    if adapter is None:
        computed = down(_Gated.apply(gate, up, act))  # type: ignore[no-untyped-call]
    else:
        computed = _GatedLoraLinear.apply(  # type: ignore[no-untyped-call]
            gate, up, act, down.linear.weight, down.linear.bias, *adapter
        )
    return computed


class _Gated(Function):
    """Compute act(gate) * up elementwise, for gate and up [..., I]. I is the intermediate size of the MLP."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        product: Tensor = act(gate) * up
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        _, gradients_of = _product(gate, up, ctx.act)
        return *gradients_of(gradients[0]), None


class _GatedLoraLinear(Function):
    """Apply the layer of `lora` to act(gate) * up, for gate and up [..., I]. I is the intermediate size of the MLP."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        act: nn.Module,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        scaling: float,
    ) -> Tensor:
        a_RI, b_OR = lora_a.to(weight.dtype), lora_b.to(weight.dtype)
        y, h_NR = lora.compute(act(gate) * up, weight, bias, a_RI, b_OR, scaling)
        ctx.save_for_backward(gate, up, h_NR, weight, a_RI, b_OR)
        ctx.act, ctx.scaling, ctx.dtype = act, scaling, lora_a.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, h_NR, weight, lora_a, lora_b = ctx.saved_tensors
        product, gradients_of = _product(gate, up, ctx.act)
        dx, da, db = lora.gradients(gradients[0], product, h_NR, weight, lora_a, lora_b, ctx.scaling, dtype=ctx.dtype)
        assert dx is not None
        return *gradients_of(dx), None, None, None, da, db, None


def _product(gate: Tensor, up: Tensor, act: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return act(gate) * up, and a function that turns the gradient of this product into the gradients of gate
    and up.
    """
    inputs = gate.detach().requires_grad_(), up.detach().requires_grad_()
    with torch.enable_grad():
        product = act(inputs[0]) * inputs[1]
    return product.detach(), lambda gradient: torch.autograd.grad(product, inputs, gradient)
