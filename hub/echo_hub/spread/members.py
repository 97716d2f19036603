"""Nodes of one broadcast, with their incoming pieces and their relay work."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from echo_hub.spread.trees import Tree
from echo_hub.spread.windows import Path


@dataclass(slots=True, eq=False)
class Member:
    node_id: str
    number: int
    bit: int
    path: Path
    num_missing: int
    reach: int = 0
    """Members that this node is linked with, as a bit mask by number."""
    flights: dict[int, float] = field(default_factory=dict)
    """Pieces sent by the hub and not confirmed yet, with their sending times."""
    overdue: set[int] = field(default_factory=set)
    """Pieces of `flights` that are unconfirmed for so long that they no longer count as queued at the hub's uplink."""
    direct: deque[int] = field(default_factory=deque)
    """Queue of pieces for direct sending by the hub, because no peer hands them on."""
    relays: dict[int, PieceRelay] = field(default_factory=dict)
    """Pieces that the hub gave this node to hand on, oldest first."""
    promised: dict[int, tuple[Member, float]] = field(default_factory=dict)
    """Pieces that a linked node was told to hand on to this node: the linked node, and the
    time when the hub told it."""
    is_slow: bool = False
    """True if this node missed a piece: another node should have sent it and did not in time. The hub then sends it
    pieces itself."""
    heard_at: float = 0.0
    """Time at which the node last got a new piece, or at which the hub last sent it a piece while no other was under
    way."""


@dataclass(slots=True, eq=False)
class PieceRelay:
    """One piece with the tree along which its owner, the node that got the piece from the hub, hands it on."""

    owner: Member
    piece: int
    tree: Tree
    since: float
    due_at: float
    """Planned time of the piece's arrival at the tree's last member; infinite while the owner's speed is unknown."""
    asked: int
    """Nodes that get the piece along the tree, as a bit mask."""
    waiting: int
    """Nodes of `asked` that still lack the piece, as a bit mask."""
    counts: bool = True
    """True while the piece counts as unfinished work in `Path.relay`, the flow-control window of the piece's owner."""
    helped: bool = False
    """True if the hub also sent the piece, so that its arrival proves nothing about the owner."""
