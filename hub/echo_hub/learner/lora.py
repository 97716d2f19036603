"""A linear layer with LoRA and a frozen base, computed with few temporaries.

    y = W x + b + s B A x;   dx = Wᵀ dy + Aᵀ dh,   dA = dh xᵀ,   dB = s dy (A x)ᵀ,   dh = s Bᵀ dy

W and b are the frozen weight and bias, A and B the adapter's two factors, s its scaling, h = A x. dv is the gradient of
the loss with respect to v. Source: LoRA (arXiv 2106.09685, eq. 3). PEFT's own layer writes B A x, its scaled copy and
the sum to memory; in the backward pass it writes two gradients of x and adds them. Here each term is accumulated in
place. For the backward pass, only x and A x [tokens, rank] are kept. A whole model needs about a third less memory, at
equal speed.

Without gradients, one pass can use several adapters, each for its own tokens (`computing_by`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners import lora
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echo_hub.config.training_sections import TrainingConfig
from echo_shared.delta.adapter import is_adaptable
from echo_shared.errors import LearnerError

Part = tuple[Tensor, Tensor, int]
"""A [R, I] and B [O, R] of one adapter, and the number of tokens to which the adapter applies."""


def use_in(config: LoraConfig) -> None:
    """Let PEFT create `LoraLinear` layers instead of its own for plain linear layers."""
    config._register_custom_module({nn.Linear: LoraLinear})


class LoraLinear(lora.Linear):
    """PEFT's layer with one adapter and no dropout. Only the computation differs from PEFT's."""

    parts: tuple[Part, ...] = ()
    """Adapters set by `computing_by` while its block runs; empty at other times."""

    @property
    def linear(self) -> nn.Linear:
        """Return the frozen linear layer that the adapter is added to."""
        return cast("nn.Linear", self.base_layer)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs [..., O] for inputs `x` [..., I]."""
        if self.disable_adapters or self.merged:
            result: Tensor = self.base_layer(x, *args, **kwargs)
            return result
        base = self.linear
        if self.adapter is None:
            (name,) = self.active_adapters
            return _by_parts(x, base, self.parts, self.scaling[name])
        computed: Tensor = _LoraLinear.apply(x, base.weight, base.bias, *self.adapter)  # type: ignore[no-untyped-call]
        return computed

    @property
    def adapter(self) -> tuple[Tensor, Tensor, float] | None:
        """Return A [R, I], B [O, R] and the scaling of the only active adapter. Return None if no adapter is active, or
        if several adapters apply to different tokens (`computing_by`).
        """
        if self.disable_adapters or self.merged or self.parts:
            return None
        (name,) = self.active_adapters
        a, b = cast("nn.Linear", self.lora_A[name]), cast("nn.Linear", self.lora_B[name])
        return a.weight, b.weight, self.scaling[name]


def targets(base: nn.Module, training: TrainingConfig) -> list[str]:
    """Return the names of the layers of `base` that `training.lora_targets` selects, sorted.

    Raises LearnerError if `base` lacks all of them, or one that the setting names.
    """
    linear = [path for path, module in base.named_modules() if isinstance(module, nn.Linear) and is_adaptable(path)]
    present = _without_experts(base, {path.rpartition(".")[2] for path in linear})
    wanted = training.lora_projections
    lacking = sorted(wanted - present) if training.names_layers else []
    if lacking or not wanted & present:
        names = ", ".join(sorted(present)) or "it has none"
        raise LearnerError(
            "The base model has no layer for the adapter.",
            got=f"training.lora_targets = {training.lora_targets}"
            + (f", without {', '.join(lacking)} in the base" if lacking else ""),
            do=f"Set training.lora_targets to layers of this base model ({names}), or choose another base model.",
        )
    return sorted(wanted & present)


def _without_experts(base: nn.Module, names: set[str]) -> set[str]:
    """Return `names` without those that PEFT takes for layers of experts.

    transformers 5 fuses the experts of some families. There, PEFT reads gate_proj, up_proj and down_proj as layers of
    the experts, even if shared experts and dense layers have these names, too.
    """
    config = LoraConfig(target_modules=sorted(names))
    convert_peft_config_for_transformers(config, base, conversions=None)
    return set(config.target_modules or ())


def layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return all `LoraLinear` layers of a model, by their names in PEFT's files."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


@contextmanager
def computing_by(
    layers: Mapping[str, LoraLinear], adapters: Sequence[tuple[Mapping[str, Tensor], int]]
) -> Iterator[None]:
    """Within the `with` block, `layers` compute with several adapters, without an autograd graph.

    The first adapter applies to the first `count` tokens, the next one to the next `count`, up to the last token.
    Weights are keyed by PEFT's names. If each adapter has few tokens, one common pass costs about as much as a separate
    pass for one adapter. S-LoRA (arXiv 2311.03285) does the same for serving.
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
    """Return outputs [..., O] for x [..., I], with each part's adapter for its own tokens."""
    x_TI = x.to(base.weight.dtype).flatten(0, -2)
    y_TO = nn.functional.linear(x_TI, base.weight, base.bias)
    begin = 0
    for a_RI, b_OR, count in parts:
        own = slice(begin, begin + count)
        y_TO[own].addmm_(x_TI[own] @ a_RI.T, b_OR.T, alpha=scaling)
        begin += count
    y: Tensor = y_TO.unflatten(0, x.shape[:-1])
    return y


def compute(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return the outputs [..., O], and A x [N, R] for all N tokens, which `gradients` needs.

    Inputs: x [..., I], weight [O, I], bias [O], lora_a [R, I], lora_b [O, R]; A and B in the weight's dtype.
    """
    x_NI = _rows(x, weight)
    h_NR = x_NI @ lora_a.T
    y_NO = nn.functional.linear(x_NI, weight, bias).addmm_(h_NR, lora_b.T, alpha=scaling)
    return y_NO.unflatten(0, x.shape[:-1]), h_NR


def gradients(
    dy: Tensor,
    x: Tensor,
    h_NR: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scaling: float,
    *,
    dtype: torch.dtype,
    of_input: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of x (None unless `of_input`), lora_a and lora_b, given the gradient `dy` of `compute`'s
    outputs. The gradients of A and B have the given dtype.
    """
    dy_NO = dy.flatten(0, -2)
    dh_NR = (dy_NO @ lora_b).mul_(scaling)
    dx = (dy_NO @ weight).addmm_(dh_NR, lora_a).unflatten(0, dy.shape[:-1]) if of_input else None
    da = (dh_NR.T @ _rows(x, weight)).to(dtype)
    db = (dy_NO.T @ h_NR).to(dtype).mul_(scaling)
    return dx, da, db


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    return x.to(weight.dtype).flatten(0, -2)


class _LoraLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
    ) -> Tensor:
        x, a_RI, b_OR = x.to(weight.dtype), lora_a.to(weight.dtype), lora_b.to(weight.dtype)
        y, h_NR = compute(x, weight, bias, a_RI, b_OR, scaling)
        ctx.save_for_backward(x, h_NR, weight, a_RI, b_OR)
        ctx.scaling, ctx.dtype = scaling, lora_a.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = of_outputs
        x, h_NR, weight, lora_a, lora_b = ctx.saved_tensors
        of_input = ctx.needs_input_grad[0]
        dx, da, db = gradients(dy, x, h_NR, weight, lora_a, lora_b, ctx.scaling, dtype=ctx.dtype, of_input=of_input)
        return dx, None, None, da, db, None
