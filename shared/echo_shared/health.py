"""In which state a hub is, in one word: the same at /healthz, on the operator's page, at /metrics and on the terminal.

    starting ──> live <──> ready ──> finished
                   └─> degraded <─┘

Whoever asks gets an answer in each of them, so a hub that answers is alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class HubState(StrEnum):
    """In one word."""

    STARTING = "starting"
    """It loads the base model: nodes may join, and nothing is trained."""
    LIVE = "live"
    """It could train, and waits for a first node."""
    READY = "ready"
    """It trains, or evaluates, with the nodes that it has."""
    DEGRADED = "degraded"
    """It serves, and an operator should look: something is broken, or was found wanting."""
    FINISHED = "finished"
    """The run is over; its pages are still served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state, and why it is no better one, a sentence each."""

    state: HubState
    reasons: tuple[str, ...] = ()
