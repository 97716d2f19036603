"""A linear layer with LoRA whose base is frozen, computed in place.

    y = W x + b + s B A x;   dx = Wᵀ dy + Aᵀ dh,   dA = dh xᵀ,   dB = s dy (A x)ᵀ,   dh = s Bᵀ dy

Source: LoRA (arXiv 2106.09685, eq. 3). PEFT's own layer writes B A x, its scaled copy and the sum to memory one after
the other, and two gradients of x that are then added; here each is added into what is there already. Besides x, only
A x [tokens, rank] is kept for the backward pass: about a third less for a whole model, in the same time.

Who only computes may have several adapters take part in one pass, each for tokens of its own (`computing_by`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from peft import LoraConfig
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Part = tuple[Tensor, Tensor, int]
"""A [R, I] and B [O, R] of an adapter, and how many tokens it computes."""


def use_in(config: LoraConfig) -> None:
    """Has PEFT make these layers, instead of its own, where the base model has plain linear ones."""
    config._register_custom_module({nn.Linear: LoraLinear})


class LoraLinear(lora.Linear):
    """PEFT's layer with one adapter, without dropout; what PEFT does with it beside the computation is unchanged."""

    parts: tuple[Part, ...] = ()
    """See `computing_by`."""

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
        (name,) = self.active_adapters
        if self.parts:
            return _by_parts(x, base, self.parts, self.scaling[name])
        computed: Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]
            x, base.weight, base.bias, self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
        )
        return computed


def layers(model: nn.Module) -> dict[str, LoraLinear]:
    """All such layers of a model, by their names in PEFT's files."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


@contextmanager
def computing_by(
    layers: Mapping[str, LoraLinear], adapters: Sequence[tuple[Mapping[str, Tensor], int]]
) -> Iterator[None]:
    """For as long as the block runs, the layers compute the first so many tokens by the first of `adapters`, as many as
    it says by the next, and so on up to the last token; without a graph. Weights are by PEFT's names.

    A pass of its own for each adapter costs as much as a larger one where their tokens are few: S-LoRA (arXiv
    2311.03285) does the same for serving.
    """
    for name, layer in layers.items():
        dtype = layer.linear.weight.dtype
        weights = ((of[f"{name}.lora_A.weight"], of[f"{name}.lora_B.weight"], count) for of, count in adapters)
        layer.parts = tuple((a_RI.to(dtype), b_OR.to(dtype), count) for a_RI, b_OR, count in weights)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.parts = ()


def _by_parts(x: Tensor, base: nn.Linear, parts: Sequence[Part], scaling: float) -> Tensor:
    """x [..., I] to outputs [..., O]."""
    x_TI = x.to(base.weight.dtype).flatten(0, -2)
    y_TO = nn.functional.linear(x_TI, base.weight, base.bias)
    begin = 0
    for a_RI, b_OR, count in parts:
        own = slice(begin, begin + count)
        y_TO[own].addmm_(x_TI[own] @ a_RI.T, b_OR.T, alpha=scaling)
        begin += count
    y: Tensor = y_TO.unflatten(0, x.shape[:-1])
    return y


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
