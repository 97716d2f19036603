"""A model's output layer, and what the model does with the layer's values.

    z = s (W h + b)            s = 1 for most models; Granite divides, Cohere multiplies
    z = c tanh(s (W h + b) / c)    if the model caps its logits at ± c, as Gemma 2 does

z are the logits of a hidden vector h; W and b are the layer's weight and bias. `Head.of` reads s and c from the model's
configuration. `check` compares the result with the model's own logits, because a model may have a setting that this
module does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from echo_shared.errors import LearnerError

_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest error at which logits count as the model's own, relative to the largest logit. The model rounds its logits to
the precision in which it computes."""


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer `linear`, with the model's scale s and cap c of its logits."""

    linear: nn.Linear
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Head:
        """Return the head (output layer) of a transformers causal LM."""
        config = model.config.get_text_config(decoder=True)
        scale = 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        scale *= getattr(config, "logit_scale", None) or 1.0
        return cls(model.get_output_embeddings(), scale, getattr(config, "final_logit_softcapping", None) or None)

    @property
    def weight(self) -> Tensor:
        """The output layer's weight [V, H]."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        """The output layer's bias [V], if it has one."""
        return self.linear.bias

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., H]."""
        values: Tensor = self.linear(hidden) * self.scale
        return values if self.cap is None else torch.tanh(values / self.cap) * self.cap

    def finish(self, values: Tensor) -> Tensor:
        """Turn the layer's values into logits, in place, and return them."""
        if self.scale != 1.0:
            values.mul_(self.scale)
        return values if self.cap is None else values.div_(self.cap).tanh_().mul_(self.cap)


@torch.no_grad()
def check(model: Any, device: torch.device) -> None:
    """Raise LearnerError unless `Head.of(model)` gives the model's own logits, tried on a few tokens."""
    states: list[Tensor] = []
    body = model.base_model
    hook = body.register_forward_hook(lambda _module, _inputs, output: states.append(output.last_hidden_state))
    try:
        expected = model(input_ids=torch.arange(5, device=device)[None], use_cache=False).logits.float()
    finally:
        hook.remove()
    found = Head.of(model)(states[0]).float()
    error = (found - expected).abs().max() / expected.abs().max()
    if not error < _TOLERANCE[states[0].dtype]:
        raise LearnerError(
            "The learner does not know how this base model computes its logits.",
            got=f"logits of {model.config.model_type} that differ by {error:.1%}",
            do="Choose a base model of docs/models.md.",
        )
