"""All connected nodes, whether on the hub's own port or at gateways. The rest of the hub need not know where a node is
connected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.effects import RolloutReceipt
from echo_hub.gateways.fleet import GatewayFleet
from echo_hub.gateways.sealing import secret_of
from echo_hub.gateways.sessions import GatewaySessions
from echo_hub.net.gateway import Gateway
from echo_hub.net.limits import ConnectionLimits
from echo_hub.net.nonces import Nonces
from echo_hub.net.send_queue import DeferredMessage, Rank
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import Checked, FromHub, ReceiptState, RefusalCode


class Connections:
    """The connections of all nodes. `net.live_nodes.NodeConnections` explains `send`, `push` and `dismiss`."""

    def __init__(self, config: HubConfig, me: Identity, *, run_id: str, limits: ConnectionLimits) -> None:
        nonces = Nonces(secret_of(me, "nonces"))
        self.limits = limits
        self.sessions = GatewaySessions()
        self.own = Gateway(me=me, settings=config.server, limits=limits, nonces=nonces, elsewhere=self.sessions)
        self.fleet = GatewayFleet(
            config.gateways,
            me=me,
            run_id=run_id,
            run_name=config.run.name,
            own=self.own,
            sessions=self.sessions,
            nonces=nonces,
        )

    def _holder(self, node_id: str) -> Gateway | GatewaySessions:
        return self.sessions if node_id in self.sessions else self.own

    def send(self, node_id: str, message: FromHub) -> bool:
        return self._holder(node_id).send(node_id, message)

    def push(self, node_id: str, message: DeferredMessage, rank: Rank) -> bool:
        return self._holder(node_id).push(node_id, message, rank)

    def dismiss(self, node_id: str, code: RefusalCode, what: str) -> None:
        self._holder(node_id).dismiss(node_id, code, what)

    async def close(self, code: RefusalCode, what: str) -> None:
        """Close the connections of all nodes, and tell the nodes why.

        If the hub stops before the run is finished, nodes behind gateways stay connected, and JetStream stores what the
        nodes send.
        """
        if code is RefusalCode.FINISHED:
            self.sessions.close(code, what)
        await self.own.close(code, what)

    def untold(self, node_id: str, receipts: Sequence[RolloutReceipt]) -> Sequence[RolloutReceipt]:
        """Return the receipts without those that the node's gateway has already sent. A gateway itself tells its nodes
        which rollouts were received."""
        if node_id not in self.sessions:
            return receipts
        return [one for one in receipts if one.state is not ReceiptState.RECEIVED or one.checked is not Checked.NO]

    def turned_away(self, passkeys: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Return the numbers of refused connections since the hub's start, by kind and reason. `passkeys` holds the
        numbers of refused uses of passkeys, by reason."""
        return {"connection": self.limits.counts, "passkey": dict(passkeys), **self.own.turned_away}
