"""All connected nodes, through the hub's own port and through gateways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from echo_hub.core.accounting.effects import RolloutReceipt
from echo_hub.gateways.items import ItemKind
from echo_hub.gateways.sessions import GatewaySessions
from echo_hub.net.gateway import Gateway
from echo_hub.net.send_queue import Rank
from echo_shared.wire.codec import encode
from echo_shared.wire.messages import Checked, FromHub, ReceiptState, RefusalCode

ELSEWHERE: Final = "This node has connected again elsewhere."


class Connections:
    """Sends to all connected nodes. `send` and `push` never wait. `has_news` is called when a message for a gateway is
    queued."""

    def __init__(self, gateway: Gateway) -> None:
        """`gateway`: serves the nodes on the hub's own port."""
        self._gateway = gateway
        gateway.displace_elsewhere = self._displace_by_gateway
        self.sessions = GatewaySessions()
        self.has_news: Callable[[], None] = lambda: None

    def send(self, node_id: str, message: FromHub) -> bool:
        """Queue a message; return False if the node is not connected."""
        if node_id not in self.sessions:
            return self._gateway.send(node_id, message)
        frame = encode(message)
        return self._say(node_id, ItemKind.SEND, frame, num_bytes=len(frame))

    def push(self, node_id: str, make: Callable[[], FromHub | None], rank: Rank) -> bool:
        """Queue a low-priority message that is built when its queue reaches it.

        For a node behind a gateway, the message is built when the hub sends it to the gateway, which again gives it low
        priority.
        """
        if node_id not in self.sessions:
            return self._gateway.push(node_id, make, rank)

        def frame() -> bytes | None:
            message = make()
            return None if message is None else encode(message)

        is_queued = self.sessions.push(node_id, rank, frame)
        self.has_news()
        return is_queued

    def dismiss(self, node_id: str, code: RefusalCode, what: str) -> None:
        """Close this node's connection, if open, report the reason to the node, and notify the inbox."""
        if node_id not in self.sessions:
            self._gateway.dismiss(node_id, code, what)
        else:  # The node's gateway reports the disconnect to the inbox.
            self._say(node_id, ItemKind.PART, code.value, what)

    async def close(self, code: RefusalCode, what: str) -> None:
        """Close the connections of all nodes and tell them why.

        If the hub stops before the run is finished, nodes behind gateways stay connected, and JetStream stores what
        they send.
        """
        if code is RefusalCode.FINISHED:
            for line in self.sessions.lines.values():
                line.put([ItemKind.CLOSE, code.value, what])
            self.has_news()
        await self._gateway.close(code, what)

    def displace(self, node_id: str) -> bool:
        """Close the older connection of a node that connects again; return True if there was one. The inbox is not
        notified."""
        return self._displace_by_gateway(node_id) or self._gateway.displace(node_id)

    def _displace_by_gateway(self, node_id: str) -> bool:
        if node_id not in self.sessions:
            return False
        self._say(node_id, ItemKind.PART, RefusalCode.ALREADY_CONNECTED.value, ELSEWHERE)
        self.sessions.end(node_id)
        return True

    def untold(self, node_id: str, receipts: Sequence[RolloutReceipt]) -> Sequence[RolloutReceipt]:
        """Leave out receipts that the node's gateway has already sent: a gateway itself tells its nodes which rollouts
        were received."""
        if node_id not in self.sessions:
            return receipts
        return [one for one in receipts if one.state is not ReceiptState.RECEIVED or one.checked is not Checked.NO]

    def _say(self, node_id: str, kind: ItemKind, *content: object, num_bytes: int = 0) -> bool:
        is_said = self.sessions.say(node_id, kind, *content, num_bytes=num_bytes)
        self.has_news()
        return is_said
