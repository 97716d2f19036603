"""What trust is told of the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustSettings:
    """The defaults check nothing: who checks is a process beside the hub, or nodes, which not every coordinator has."""

    enabled: bool = False
    by_nodes: bool = False
    """Nodes compute each other's rollouts again; else a process beside the hub does."""
    check_deadline_s: float = 60.0
    """What one node may take for that."""
    secret: bytes = b""
    """Which rollouts are checked follows from it: no node may know it."""
    least_checked: float = 0.03
    """Of a proven node's rollouts, so many are checked in the long run."""
    first_checked: int = 64
    """A node's first rollouts, so many at least, are all checked, before anybody trains on them."""
    false_alarm: float = 1e-6
    """An honest node is convicted no oftener than once in the reciprocal of this, in checked rollouts."""
    temperature: float = 1.0
    """Of all leases."""
    miss: float = 1e-3
    """A node that forges a fifth of its tokens passes for honest no oftener than this."""
