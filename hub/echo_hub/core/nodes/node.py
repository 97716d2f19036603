"""One node's record, and what of the run's settings concerns nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from echo_hub.core.nodes.pace import Pace
from echo_shared.messages import StandbyReason

HUB_NODE_ID: Final = "hub"
"""The learner as a sampler, in co-located mode: no other node's id looks like this."""

UNPROVEN: Final = -(2**30)
"""The speed class of nodes of which nothing is known yet."""

Place = tuple[int, int, int]
"""Where a node waits for work: version, tier, class of its pace. See `queues`."""

Samplers = Literal["by_version", "any", "hub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """`samplers`, who may take which lease: "by_version", a node that has a version as new as the lease asks for;
    "any", every node, for it fetches the lease's version before it samples; "hub", the hub alone."""

    samplers: Samplers
    lease_size: int
    """Rollouts that a lease has where nothing keeps it smaller."""
    deadline_s: float
    first_window: int
    """Rollouts that a node may hold that has returned none yet while no other has; else it may hold one."""
    unproven_most: int
    """Rollouts that all such nodes together may hold, once any other node is there and as long as they return them: the
    base of `strangers`."""


@dataclass(slots=True, eq=False)
class Node:
    """One node that is connected, that still holds leases, that rests, or whose window is remembered."""

    node_id: str
    window: int
    """Rollouts that it has earned to hold at once."""
    connected: bool = False
    capacity: int = 0
    """Rollouts that it says it is willing to hold."""
    policy_version: int | None = None
    """The newest that it can sample from; None = none."""
    held: int = 0
    """Rollouts leased to it and not yet received."""
    held_tokens: float = 0.0
    """What these are likely to come to."""
    unchecked: int = 0
    """Rollouts of it that have come in and whose reward waits for a check: they take room as if it still held them."""
    overdue: int = 0
    """Rollouts among those that are held whose deadline has passed."""
    proven: bool = False
    """Something that it returned was scored."""
    pace: Pace = field(default_factory=Pace)
    speed: int = UNPROVEN
    """The class of its pace; smaller is faster."""
    counted: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The tokens_per_s, token_s and way_s with which it counts in the pool's pace."""
    candidate: int | None = None
    """The version that it counts with among those that take work; None: it takes none. Kept by `Nodes`."""
    place: Place | None = None
    """Where it waits; None: it has no room. Kept by `ReadyQueues`."""
    num_silences: int = 0
    """Times that all it held was overdue, since a rollout of it was scored."""
    num_failures: int = 0
    """Failures since a rollout of it was scored."""
    deaths: float = 0.0
    """Processes for scoring that it ended, less what is forgiven."""
    deadly_group: int | None = None
    """The group whose completion last ended a process for scoring."""
    quarantined: bool = False
    """It is given nothing, for it is not trusted."""
    origin: str = ""
    """Where it connects from; empty = not known."""
    has_place: bool = False
    """It has one of the places of its origin: kept by `Origins`."""
    rests_until: float | None = None
    """None = it does not rest."""
    per_hour: float = 0.0
    """What it costs in US dollars; 0 = a gift."""
    active: bool = True
    """It may be leased to: see `echo_hub.core.activation`, which alone changes this."""
    behind_s: float = 0.0
    """From a version's training until it has it; 0 = not known."""
    taken_at: float = 0.0
    """When it last was given work, or came to be able to."""
    num_late: int = 0
    """Rollouts that it holds and that take far longer than they should."""
    late_since: float | None = None
    """Since when there are such; None = there are none."""
    hangs: bool = False
    """It does now what `num_hangs` counts."""
    num_hangs: int = 0
    """Times that it has let others wait so long that what it brings did not count any more."""
    settled_from: float = 0.0
    """From then on others may stand by for its sake; 0 = nobody knows what it brings."""
    told: StandbyReason | None = None
    """Why it has no work, as it was told last."""
    told_halted: str = ""
    """Why nobody has any, as it was told last."""

    @property
    def limit(self) -> int:
        """Rollouts that it may hold: what it claims, as far as it has earned it and it is of use."""
        earned = self.window if self.window < self.capacity else self.capacity
        takes = self.pace.takes
        return takes if 0 < takes < earned else earned

    @property
    def free(self) -> int:
        """Rollouts that it has room for."""
        return self.limit - self.in_flight - self.unchecked

    @property
    def in_flight(self) -> int:
        """Rollouts that it holds within their deadline."""
        return self.held - self.overdue

    @property
    def is_hub(self) -> bool:
        return self.node_id == HUB_NODE_ID
