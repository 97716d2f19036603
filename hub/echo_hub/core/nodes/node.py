"""Record of one node, and the run settings that concern nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from echo_hub.core.nodes.pace import NodePace
from echo_shared.wire.messages import StandbyReason

HUB_NODE_ID: Final = "hub"
"""Node id of the learner as its own sampler in co-located mode. No other node's id looks like this."""

UNPROVEN: Final = -(2**30)
"""Speed class of nodes without any measured completion."""

Place = tuple[int, int, int]
"""Queue in which a ready node waits: version, tier, speed class. See `queues`."""

Samplers = Literal["by_version", "any", "hub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Settings of nodes.

    `samplers` decides which nodes may take a lease:
    - "by_version": nodes with the lease's required version or a newer one;
    - "any": every node, because nodes fetch the lease's version before sampling;
    - "hub": only the hub's own sampler.
    """

    samplers: Samplers
    lease_size: int
    """Upper bound of rollouts per lease, where nothing else keeps the lease smaller."""
    deadline_s: float
    first_window: int
    """Rollouts that an unproven node may hold while no node is proven. Afterwards it may hold one."""
    unproven_most: int
    """Base of `strangers`: rollouts that all unproven nodes together may hold while other nodes are present."""


@dataclass(slots=True, eq=False)
class Node:
    """One node that is connected, holds leases, rests, or has a remembered window."""

    node_id: str
    window: int
    """Number of rollouts that the node has earned to hold at once."""
    connected: bool = False
    capacity: int = 0
    """Number of rollouts that the node claims to be willing to hold."""
    policy_version: int | None = None
    """Newest version that the node can sample from; None = none."""
    held: int = 0
    """Rollouts leased to the node and not received yet."""
    held_tokens: float = 0.0
    """Expected total length of the held rollouts."""
    unchecked: int = 0
    """Received rollouts whose reward waits for a check. They use capacity like held rollouts."""
    overdue: int = 0
    """Held rollouts whose deadline has passed."""
    proven: bool = False
    """True once a rollout of the node was scored."""
    pace: NodePace = field(default_factory=NodePace)
    speed: int = UNPROVEN
    """Speed class of the measured pace; smaller is faster."""
    counted: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The node's share in the pool's pace: tokens_per_s, token_s, way_s."""
    candidate: int | None = None
    """Version under which the node counts as a candidate for work; None: no candidate. Maintained by `Nodes`."""
    place: Place | None = None
    """Queue in which the node waits; None: no free capacity. Maintained by `ReadyQueues`."""
    num_silences: int = 0
    """Times that all held rollouts were overdue, since the last scored rollout."""
    num_failures: int = 0
    """Failures since the last scored rollout."""
    deaths: float = 0.0
    """Number of scorer processes that its completions killed, minus forgiveness."""
    deadly_group: int | None = None
    """Group whose completion last killed a scorer process."""
    quarantined: bool = False
    """True while the node is distrusted and gets no work."""
    origin: str = ""
    """Network origin or invite of the node; empty = unknown."""
    has_place: bool = False
    """True if the node holds one of its origin's places. Maintained by `Origins`."""
    rests_until: float | None = None
    """End of the rest; None = not resting."""
    per_hour: float = 0.0
    """Cost in US dollars per hour; 0 = a gift."""
    active: bool = True
    """True if leases are allowed. Only `echo_hub.core.activation` changes this."""
    behind_s: float = 0.0
    """Delay from training a version until the node has it; 0 = unknown."""
    taken_at: float = 0.0
    """Time at which the node last got work or became able to take work."""
    num_late: int = 0
    """Held rollouts that take far longer than expected."""
    late_since: float | None = None
    """Start of the current period with late rollouts; None = none is late."""
    hangs: bool = False
    """True while the node is in a hang counted by `num_hangs`."""
    num_hangs: int = 0
    """Times that the node delayed others until its results no longer counted."""
    settled_from: float = 0.0
    """Start time of the node's reliable output, which lets other nodes stand by; 0 = unknown."""
    told: StandbyReason | None = None
    """Reason for having no work, as last sent to the node."""
    told_halted: str = ""
    """Reason why no node gets work, as last sent to the node."""

    @property
    def limit(self) -> int:
        """Return how many rollouts the node may hold: the least of claim, earned window and useful amount."""
        earned = self.window if self.window < self.capacity else self.capacity
        takes = self.pace.takes
        return takes if 0 < takes < earned else earned

    @property
    def free(self) -> int:
        """Return how many more rollouts the node may hold."""
        return self.limit - self.in_flight - self.unchecked

    @property
    def in_flight(self) -> int:
        """Return how many rollouts the node holds within their deadline."""
        return self.held - self.overdue

    @property
    def is_hub(self) -> bool:
        return self.node_id == HUB_NODE_ID
