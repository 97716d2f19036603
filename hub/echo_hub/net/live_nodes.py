"""The connected nodes, and how to send them messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from echo_hub.net.send_queue import DeferredMessage, Rank
from echo_shared.records.run import LiveNode
from echo_shared.wire.messages import FromHub, Links, RefusalCode, Standby, StandbyReason


class NodeSender(Protocol):
    """Sends messages to nodes. Implemented as `NodeConnections`."""

    def send(self, node_id: str, message: FromHub) -> bool:
        """Queue the message; return False if the node is not connected. Never waits."""


class NodeConnections(NodeSender, Protocol):
    """The connections of nodes. Implemented by `net.gateway.Gateway` (one port), `gateways.sessions.GatewaySessions`
    (gateway processes) and `gateways.connections.Connections` (both). All methods return at once.
    """

    def push(self, node_id: str, message: DeferredMessage, rank: Rank) -> bool:
        """Queue a low-priority message. Return False if the node is not connected."""

    def dismiss(self, node_id: str, code: RefusalCode, what: str) -> None:
        """Close this node's connection, if open, report the reason to the node, and notify the inbox."""


class LiveNodes(dict[str, LiveNode]):
    """Connected nodes by id. `echo_hub.intake.connected` adds and removes them; other parts of the hub read them."""

    def told(self, node_id: str, reason: StandbyReason | None, detail: str) -> Standby:
        """Return the message that puts the node on standby for this reason; with None, the message that ends its
        standby. Keep the reason for the pages.
        """
        live = self.get(node_id)
        if live is not None:
            standby = "" if reason is None else f"{reason.value.replace('_', ' ')}. {detail}".strip()
            self[node_id] = replace(live, standby=standby, affordable=reason is not StandbyReason.SPEND_CAP)
        return Standby(reason=reason, detail=detail)

    def linked(self, node_id: str, links: Links) -> None:
        """Store the number of the node's links with other nodes, for the pages."""
        if (live := self.get(node_id)) is not None:
            self[node_id] = replace(live, num_links=len(links.node_ids), num_punched=len(links.punched))

    def stands_by(self, node_id: str) -> bool:
        """Return True if the node is connected and on standby: the hub's newest message to it gave a reason for having
        no work.
        """
        live = self.get(node_id)
        return live is not None and bool(live.standby)
