"""What bases come to as they are: measured once a process, for all runs that begin with the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from echo_hub.config.sections import HubConfig

_SECTIONS: Final = {"model", "task", "sampling", "evaluation"}
"""What the accuracy follows from: a fresh adapter changes nothing, and what is held out is the task's alone."""
_found: dict[str, float] = {}


def accuracy_of_base(config: HubConfig, measure: Callable[[], float]) -> float:
    """Greedy, held out, before the first step. `measure` is called if no run of these settings was, whatever its seed
    and how it trains."""
    key = config.model_dump_json(include=_SECTIONS)
    if key not in _found:
        _found[key] = measure()
    return _found[key]
