"""All connected nodes, by whichever door they came in: those on the hub's own port, and those by gateways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from echo_hub.core.effects import Receipt
from echo_hub.gateways.items import Kind
from echo_hub.gateways.sessions import Sessions
from echo_hub.net.gateway import Gateway
from echo_hub.net.send_queue import Rank
from echo_shared.codec import encode
from echo_shared.messages import Checked, FromHub, ReceiptState, RefusalCode

ELSEWHERE: Final = "This node has connected again elsewhere."


class Connections:
    """`send` and `push` never wait. `has_news` is called when something waits for gateways."""

    def __init__(self, gateway: Gateway) -> None:
        """`gateway`: the hub's own port."""
        self._gateway = gateway
        gateway.displace_elsewhere = self._displace_by_gateway
        self.sessions = Sessions()
        self.has_news: Callable[[], None] = lambda: None

    def send(self, node_id: str, message: FromHub) -> bool:
        """Queues the message; False when the node is not connected."""
        if node_id not in self.sessions:
            return self._gateway.send(node_id, message)
        frame = encode(message)
        return self._say(node_id, Kind.SEND, frame, num_bytes=len(frame))

    def push(self, node_id: str, make: Callable[[], FromHub | None], rank: Rank) -> bool:
        """Queues a message that yields to all others, to be made when its turn comes: to be sent, or to be given to the
        node's gateway, where it yields again."""
        if node_id not in self.sessions:
            return self._gateway.push(node_id, make, rank)

        def frame() -> bytes | None:
            message = make()
            return None if message is None else encode(message)

        is_queued = self.sessions.push(node_id, rank, frame)
        self.has_news()
        return is_queued

    def dismiss(self, node_id: str, code: RefusalCode, what: str) -> None:
        """Ends this node's connection, if it has one, and tells it why; the inbox hears that it left."""
        if node_id not in self.sessions:
            self._gateway.dismiss(node_id, code, what)
        else:  # Its gateway says that it left.
            self._say(node_id, Kind.PART, code.value, what)

    async def close(self, code: RefusalCode, what: str) -> None:
        """Tells every node why the hub ends the connection, and ends it. Those by gateways stay when it only stops, and
        what they send is stored."""
        if code is RefusalCode.FINISHED:
            for line in self.sessions.lines.values():
                line.put([Kind.CLOSE, code.value, what])
            self.has_news()
        await self._gateway.close(code, what)

    def displace(self, node_id: str) -> bool:
        """Ends the node's connection, which has connected again. Whether it had one; its inbox does not hear of it."""
        return self._displace_by_gateway(node_id) or self._gateway.displace(node_id)

    def _displace_by_gateway(self, node_id: str) -> bool:
        if node_id not in self.sessions:
            return False
        self._say(node_id, Kind.PART, RefusalCode.ALREADY_CONNECTED.value, ELSEWHERE)
        self.sessions.end(node_id)
        return True

    def untold(self, node_id: str, receipts: Sequence[Receipt]) -> Sequence[Receipt]:
        """Of these, those that the node was not told by its gateway: that says itself what is received."""
        if node_id not in self.sessions:
            return receipts
        return [one for one in receipts if one.state is not ReceiptState.RECEIVED or one.checked is not Checked.NO]

    def _say(self, node_id: str, kind: Kind, *content: object, num_bytes: int = 0) -> bool:
        is_said = self.sessions.say(node_id, kind, *content, num_bytes=num_bytes)
        self.has_news()
        return is_said
