"""The ways in which nodes connect to the hub: the hub's own port, and gateways."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from echo_hub.config.sections import HubConfig
from echo_hub.gateways.connections import Connections
from echo_hub.gateways.fleet import GatewayFleet
from echo_hub.gateways.sealing import secret_of
from echo_hub.net.gateway import Gateway
from echo_hub.net.limits import ConnectionLimits
from echo_hub.net.nonces import Nonces
from echo_shared.signing.identity import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Create with `of`."""

    own: Gateway
    """Sessions on the hub's own port."""
    connections: Connections
    """Sessions of all nodes, on the hub's own port and at gateways."""
    fleet: GatewayFleet
    """The hub's lines to its gateways."""
    limits: ConnectionLimits

    @classmethod
    def of(cls, config: HubConfig, me: Identity, *, run_id: str, limits: ConnectionLimits) -> Doors:
        nonces = Nonces(secret_of(me, "nonces"))
        own = Gateway(me=me, settings=config.server, limits=limits, nonces=nonces, clock=time.time)
        connections = Connections(own)
        fleet = GatewayFleet(
            config.gateways,
            me=me,
            run_id=run_id,
            run_name=config.run.name,
            connections=connections,
            nonces=nonces,
        )
        return cls(own=own, connections=connections, fleet=fleet, limits=limits)

    def turned_away(self, passkeys: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Return the numbers of refused connections since the hub's start, by kind and reason. `passkeys`: refused uses
        of passkeys, by reason."""
        return {"connection": self.limits.counts, "passkey": dict(passkeys), **self.own.turned_away}
