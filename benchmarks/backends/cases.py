"""Reasons why this machine cannot run an engine."""

from __future__ import annotations

from functools import cache

import torch

from echo_node.backends.registry import survey
from echo_node.host import hardware
from echo_shared.sampling.torch_precision import multiplies


@cache
def lacks(backend: str, precision: str) -> str:
    """Return why this machine cannot run the engine on its CPU in this precision; "" if it can."""
    for possible in survey(hardware.detect()):
        if (possible.choice.name, possible.choice.device) == (backend, "cpu") and possible.missing is not None:
            return possible.missing.got or possible.missing.what
    if (backend, precision) == ("torch", "bf16") and not multiplies(torch.device("cpu"), torch.bfloat16):
        return "hardware that multiplies bfloat16"
    return ""
