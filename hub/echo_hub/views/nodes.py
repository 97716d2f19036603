"""Views of nodes: their database records, and their own latest reports."""

from __future__ import annotations

from typing import Protocol

from echo_hub.dashboard.model import NodeView
from echo_shared.records.run import NodeTotals


class ConnectedNode(Protocol):
    """The latest report of a connected node about itself, as in `echo_hub.net.live_nodes.LiveNode`."""

    activity: str
    capacity: int
    policy_version: int | None
    tokens_per_s: float
    precision: str
    cost_per_hour: float
    standby: str
    affordable: bool


def node_view(totals: NodeTotals, said: ConnectedNode | None, *, in_flight: int) -> NodeView:
    """Return the view of one node. `said` is its latest report, or None if it is disconnected."""
    return NodeView(
        totals=totals,
        connected=said is not None,
        activity=said.activity if said else "",
        policy_version=said.policy_version if said else None,
        capacity=said.capacity if said else 0,
        in_flight=in_flight,
        tokens_per_s=said.tokens_per_s if said else 0.0,
        precision=(said.precision if said else "") or totals.precision,
        costs_per_hour=said.cost_per_hour if said else 0.0,
        standby=said.standby if said else "",
    )
