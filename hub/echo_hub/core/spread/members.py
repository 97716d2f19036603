"""The nodes of one broadcast, each with what is on its way to it and what it hands on to others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from echo_hub.core.spread.windows import Path


@dataclass(slots=True, eq=False)
class Member:
    """A node of this broadcast."""

    node_id: str
    bit: int
    path: Path
    num_missing: int
    reach: int = 0
    """Members that it hands on to."""
    flights: dict[int, float] = field(default_factory=dict)
    """Pieces on their way from the hub, and when they were sent."""
    overdue: set[int] = field(default_factory=set)
    """Of them: those that take no room at the hub's uplink any more."""
    direct: deque[int] = field(default_factory=deque)
    """Pieces to be sent to it that nobody hands on."""
    relays: dict[int, Relay] = field(default_factory=dict)
    """Pieces that it hands on, oldest first."""
    heard_at: float = 0.0
    """When it last had a piece that it lacked before, or was sent one with none on its way."""


@dataclass(slots=True, eq=False)
class Relay:
    """A piece that its owner hands on."""

    owner: Member
    piece: int
    since: float
    due_at: float
    """By then all should have it; infinite while nothing is known of its owner."""
    asked: int
    """Members that were to get it so."""
    waiting: int
    """Of them: those that do not have it yet."""
    counts: bool = True
    """Whether it takes room in the owner's relay window."""
    helped: bool = False
    """The hub sent it too, so that when it is there says nothing about the owner."""
