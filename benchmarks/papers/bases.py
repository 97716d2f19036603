"""Accuracies of untrained base models, measured once in each process for all runs that begin with the same base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from echo_hub.config.sections import HubConfig

_SECTIONS: Final = {"model", "task", "sampling", "evaluation"}
"""Settings that determine the accuracy: a fresh adapter changes nothing, and the task determines the held-out
problems."""
_found: dict[str, float] = {}


def accuracy_of_base(config: HubConfig, measure: Callable[[], float]) -> float:
    """Greedy held-out accuracy before the first step. `measure` is called once for all seeds and ways to train."""
    key = config.model_dump_json(include=_SECTIONS)
    if key not in _found:
        _found[key] = measure()
    return _found[key]
