"""Names of the cases, and reasons why this machine cannot measure a case."""

from __future__ import annotations

from functools import cache

import torch

from echo_node.backends.registry import survey
from echo_node.host import hardware
from echo_shared.torch_precision import multiplies

PREFIX_SHARING = "prefix sharing"
SPLIT = "split"


def speed(model: str, backend: str, precision: str, width: int) -> str:
    return f"speed, {model}, {backend} {precision}, width {width}"


def agreement(backend: str, precision: str) -> str:
    return f"agreement, {backend} {precision}"


def swap(model: str, backend: str) -> str:
    return f"swap, {model}, {backend}"


@cache
def lacks(backend: str, precision: str) -> str:
    """Why this machine cannot run an engine on the CPU in this precision; empty if it can."""
    for possible in survey(hardware.detect()):
        if (possible.choice.name, possible.choice.device) == (backend, "cpu") and possible.missing is not None:
            return possible.missing.got or possible.missing.what
    if (backend, precision) == ("torch", "bf16") and not multiplies(torch.device("cpu"), torch.bfloat16):
        return "hardware that multiplies bfloat16"
    return ""
