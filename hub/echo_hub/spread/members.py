"""Nodes of one broadcast, with incoming pieces and relay work."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from echo_hub.spread.trees import Tree
from echo_hub.spread.windows import Path


@dataclass(slots=True, eq=False)
class Member:
    """One node of a broadcast."""

    node_id: str
    number: int
    bit: int
    path: Path
    num_missing: int
    reach: int = 0
    """Linked members, as a bit mask."""
    flights: dict[int, float] = field(default_factory=dict)
    """Pieces on their way from the hub, with their sending times."""
    overdue: set[int] = field(default_factory=set)
    """Pieces of `flights` that no longer count against the hub's uplink."""
    direct: deque[int] = field(default_factory=deque)
    """Queued pieces for direct sending, which no peer hands on."""
    relays: dict[int, PieceRelay] = field(default_factory=dict)
    """Pieces that this node owns and hands on, oldest first."""
    promised: dict[int, tuple[Member, float]] = field(default_factory=dict)
    """Pieces promised by a neighbour: the neighbour and the time of the request."""
    is_slow: bool = False
    """True if a neighbour's promised piece did not arrive in time."""
    heard_at: float = 0.0
    """Time of the last new piece, or of the last send to an idle member."""


@dataclass(slots=True, eq=False)
class PieceRelay:
    """One piece that its owner hands on along a tree."""

    owner: Member
    piece: int
    tree: Tree
    since: float
    due_at: float
    """Time at which all members should have the piece; infinite while the owner's speed is unknown."""
    asked: int
    """Members that the tree should serve, as a bit mask."""
    waiting: int
    """Members of `asked` that lack the piece."""
    counts: bool = True
    """True if the piece counts against the owner's relay window."""
    helped: bool = False
    """True if the hub also sent the piece, so that its arrival proves nothing about the owner."""
