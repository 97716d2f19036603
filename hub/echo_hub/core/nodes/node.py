"""One node's record, and what of the run's settings concerns nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

HUB_NODE_ID: Final = "hub"
"""The learner as a sampler, in co-located mode: no other node's id looks like this."""

Samplers = Literal["by_version", "any", "hub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """`samplers`, who may take which lease: "by_version", a node that has a version as new as the lease asks for;
    "any", every node, for it fetches the lease's version before it samples; "hub", the hub alone."""

    samplers: Samplers
    lease_size: int
    """Rollouts that a lease has where nothing keeps it smaller."""
    deadline_s: float


@dataclass(slots=True, eq=False)
class Node:
    """One node that is connected, or that still holds leases, or that rests."""

    node_id: str
    connected: bool = False
    capacity: int = 0
    """Rollouts that it is willing to hold."""
    policy_version: int | None = None
    """The newest that it can sample from; None = none."""
    held: int = 0
    """Rollouts leased to it and not yet received."""
    overdue: int = 0
    """Rollouts among those that are held whose deadline has passed."""
    last_lease_id: int = 0
    silent: bool = False
    """A rollout of it passed its deadline, and none was scored since."""
    num_silences: int = 0
    """Times since then that all it held was overdue."""
    num_failures: int = 0
    """Failures since a rollout of it was scored."""
    deaths: float = 0.0
    """Processes for scoring that it ended, less what is forgiven."""
    deadly_group: int | None = None
    """The group whose completion last ended a process for scoring."""
    rests_until: float | None = None
    """None = it does not rest."""

    @property
    def free(self) -> int:
        """Rollouts that it has room for."""
        return self.capacity - self.in_flight

    @property
    def in_flight(self) -> int:
        """Rollouts that it holds within their deadline."""
        return self.held - self.overdue

    @property
    def is_hub(self) -> bool:
        return self.node_id == HUB_NODE_ID
