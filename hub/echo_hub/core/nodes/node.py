"""Record of one node, and the run settings that concern nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from echo_hub.core.nodes.pace import NodePace
from echo_shared.wire.messages import StandbyReason

HUB_NODE_ID: Final = "hub"
"""Node id of the learner as its own sampler in co-located mode. No other node's id looks like this."""

UNPROVEN: Final = -(2**30)
"""Value of `Node.speed` for a node without any scored rollout, whose speed is unknown."""

Place = tuple[int, int, int]
"""Key of the queue in which a node with free capacity waits: version, tier (1 if at least half of its capacity is in
use, else 0), speed class. See `queues`."""

Samplers = Literal["by_version", "any", "hub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Settings of the run that limit what nodes may hold.

    `samplers` decides which nodes may take a lease:
    - "by_version": nodes with the lease's required version or a newer one;
    - "any": every node, because nodes fetch the lease's version before sampling;
    - "hub": only the hub's own sampler.
    """

    samplers: Samplers
    lease_size: int
    """Free capacity, in rollouts, from which a node may always get a lease: the size of a whole lease."""
    deadline_s: float
    first_window: int
    """Rollouts that an unproven node (without any scored rollout) may hold while no node is proven. Once one is proven,
    an unproven node may hold one rollout. A first lease may be larger, see `Nodes.room`."""
    unproven_most: int
    """Rollouts that all unproven nodes together may hold while proven ones are present; the base that `strangers`
    adjusts."""


@dataclass(slots=True, eq=False)
class Node:
    """Record of one node that is connected, holds leases, rests (gets no work after misbehaviour), or left but has
    earned a window that is remembered."""

    node_id: str
    window: int
    """Number of rollouts that the node has earned to hold at once by returning work in time."""
    connected: bool = False
    capacity: int = 0
    """Number of rollouts that the node claims to be willing to hold."""
    policy_version: int | None = None
    """Newest version that the node can sample from; None = none."""
    held: int = 0
    """Rollouts leased to the node and not received yet."""
    held_tokens: float = 0.0
    """Expected total length in tokens of the held rollouts."""
    unchecked: int = 0
    """Received rollouts whose reward is held back until they are checked. They use capacity like held rollouts."""
    overdue: int = 0
    """Number of held rollouts whose deadline has passed. They use no capacity."""
    proven: bool = False
    """True once a rollout of the node was scored: the node is proven."""
    pace: NodePace = field(default_factory=NodePace)
    speed: int = UNPROVEN
    """Speed class of the node's measured seconds per token; smaller is faster."""
    counted: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The node's figures as included in the sums over all nodes: tokens_per_s, token_s (seconds per token of one
    completion) and way_s (transit seconds)."""
    candidate: int | None = None
    """Version for which the node counts as able to take work (a candidate); None: it takes no work. Maintained by
    `Nodes`."""
    place: Place | None = None
    """Queue in which the node waits for work; None: it has no free capacity. Maintained by `ReadyQueues`."""
    num_silences: int = 0
    """Number of times since the node's last scored rollout that every rollout it held was past its deadline."""
    num_failures: int = 0
    """Leases returned and invalid messages since the node's last scored rollout, counted once per rest."""
    deaths: float = 0.0
    """Scorer processes that the node's completions killed, minus what its scored rollouts have forgiven."""
    deadly_group: int | None = None
    """Group whose completion last killed a scorer process."""
    quarantined: bool = False
    """True while the node gets no work because checks found it dishonest."""
    origin: str = ""
    """Invite that the node used, else the network address or range that it connects from; empty = unknown."""
    has_place: bool = False
    """True if the node uses one of the places that limit the unproven nodes of its origin. Maintained by `Origins`."""
    rests_until: float | None = None
    """Time until which the node gets no work after misbehaviour (its rest); None = it is not resting."""
    per_hour: float = 0.0
    """Price in US dollars per hour; 0 = the node costs nothing (a gift)."""
    active: bool = True
    """True if the node may get leases: it costs nothing, or `echo_hub.core.activation` has chosen to pay it. Changed
    only through `Nodes`."""
    behind_s: float = 0.0
    """Average seconds from the training of a version until the node reports having it; 0 = unknown."""
    taken_at: float = 0.0
    """Time at which the node last got work or became able to take work."""
    num_late: int = 0
    """Number of held rollouts that take far longer than expected, or whose node was away for too long."""
    late_since: float | None = None
    """Time since which the node has had at least one late rollout; None = none is late."""
    hangs: bool = False
    """True while the node has had a late rollout for so long that its speed no longer counts: a hang."""
    num_hangs: int = 0
    """Number of hangs so far: periods with a late rollout in which the node's speed no longer counted."""
    settled_from: float = 0.0
    """Time from which the node counts as reliable enough to send other nodes to standby in its favour; 0 = unknown."""
    told: StandbyReason | None = None
    """Reason why the node gets no work, as last sent to it; None = it was told that it may get work."""
    told_halted: str = ""
    """Reason why no node gets work, as last sent to this node; empty = none."""

    @property
    def limit(self) -> int:
        """Return how many rollouts the node may hold: the smallest of its claimed capacity, its earned window, and the
        number that keeps it busy (`pace.takes`)."""
        earned = self.window if self.window < self.capacity else self.capacity
        takes = self.pace.takes
        return takes if 0 < takes < earned else earned

    @property
    def free(self) -> int:
        """Return how many more rollouts the node may hold."""
        return self.limit - self.in_flight - self.unchecked

    @property
    def in_flight(self) -> int:
        """Return the number of held rollouts within their deadline."""
        return self.held - self.overdue

    @property
    def is_hub(self) -> bool:
        return self.node_id == HUB_NODE_ID
