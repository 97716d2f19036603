"""Check that engines can draw with an adapter: compute a fixed prompt with it, and look at the largest value.

Finite weights can give infinite values, for example after a step with a huge learning rate. Such an adapter would fail
on every node. Many nodes compute in float16, whose largest number is 65,504. The limit here is half of that number. It
does not apply to a base whose own activations exceed it.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from echo_hub.learner.models.adapters import AdapterSeat, LoraTensors
from echo_hub.learner.models.prompts import PromptJob, prompt_logprobs
from echo_hub.learner.policy import Policy
from echo_hub.tenants.refusal import Refusal, RefusalKind

MOST: Final = torch.finfo(torch.float16).max / 2
"""Limit on the largest absolute value that the fixed prompt gives. Other prompts may give larger values, so the limit
is half of float16's largest number.
"""
TOKENS: Final = 32


class AdapterProbe:
    """Computes the fixed prompt with adapters on a loaded base."""

    def __init__(self, policy: Policy, seat: AdapterSeat) -> None:
        self._policy = policy
        self._seat = seat
        self._prompt_ids = np.random.default_rng(0).integers(0, policy.vocab_size, TOKENS).astype(np.int32)
        self._largest_of_base: float | None = None

    def check(self, adapter: LoraTensors) -> None:
        """Raise Refusal if engines could not draw with this adapter."""
        if self._largest_of_base is None:
            self._largest_of_base = self._largest(None)
        found = self._largest(adapter)
        if math.isfinite(found) and (found <= MOST or self._largest_of_base > MOST):
            return
        raise Refusal(
            RefusalKind.INVALID,
            "Nodes could not draw with these weights: they give values that are too large for 16 bits.",
            got=f"{found:.3g} on a short prompt; {MOST:.0f} is allowed",
            do="Load earlier weights, and train on with a smaller learning_rate.",
        )

    def _largest(self, adapter: LoraTensors | None) -> float:
        """Return the largest absolute value that any module computes; inf or NaN if one is not finite."""
        self._seat.hold(adapter)
        found: list[Tensor] = []

        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                found.append(output.detach().abs().amax().float())

        with ExitStack() as hooks:
            for module in self._policy.model.modules():
                handle = module.register_forward_hook(look)
                hooks.callback(handle.remove)
            (result,) = prompt_logprobs(self._policy, [PromptJob(number=0, prompt_ids=self._prompt_ids)])
        if not np.isfinite(result.logprobs[1:]).all():
            return math.inf
        return float(torch.stack(found).amax())
