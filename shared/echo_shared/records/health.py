"""State of a hub, as shown at /healthz, at /metrics, on the operator's page and in the terminal.

    starting ──> live <──> ready ──> finished
                   └─> degraded <─┘

A hub answers requests in every state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class HubState(StrEnum):
    STARTING = "starting"
    """The base model is loading: nodes may join, but no step is trained."""
    LIVE = "live"
    """The hub could train, but no node has connected yet."""
    READY = "ready"
    """The hub trains or evaluates with its nodes."""
    DEGRADED = "degraded"
    """The hub works, but a problem needs the operator's attention."""
    FINISHED = "finished"
    """The run is over; the pages remain available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state, with one sentence per reason that prevents a better state."""

    state: HubState
    reasons: tuple[str, ...] = ()
