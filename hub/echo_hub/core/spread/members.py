"""The nodes of one broadcast, each with what is on its way to it and what it hands on to others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from echo_hub.core.spread.trees import Tree
from echo_hub.core.spread.windows import Path


@dataclass(slots=True, eq=False)
class Member:
    """A node of this broadcast."""

    node_id: str
    number: int
    bit: int
    path: Path
    num_missing: int
    reach: int = 0
    """Members that it is linked with, as a bit mask."""
    flights: dict[int, float] = field(default_factory=dict)
    """Pieces on their way from the hub, and when they were sent."""
    overdue: set[int] = field(default_factory=set)
    """Pieces of `flights` that take no room at the hub's uplink any more."""
    direct: deque[int] = field(default_factory=deque)
    """Pieces to be sent to it that nobody hands on."""
    relays: dict[int, Relay] = field(default_factory=dict)
    """Pieces whose trees begin with it, oldest first."""
    promised: dict[int, tuple[Member, float]] = field(default_factory=dict)
    """Pieces that come from a neighbour that had them, and since when it is to send them."""
    is_slow: bool = False
    """It did not get what a neighbour was to send it."""
    heard_at: float = 0.0
    """When it last had a piece that it lacked before, or was sent one with none on its way."""


@dataclass(slots=True, eq=False)
class Relay:
    """A piece that its owner hands on, and others after it."""

    owner: Member
    piece: int
    tree: Tree
    since: float
    due_at: float
    """When all should have the piece; infinite while nothing is known of its owner."""
    asked: int
    """Members that were to get the piece by the tree, as a bit mask."""
    waiting: int
    """Members of `asked` that do not have it yet."""
    counts: bool = True
    """Whether it takes room in the owner's relay window."""
    helped: bool = False
    """The hub sent the piece too, so that its arrival says nothing about the owner."""
