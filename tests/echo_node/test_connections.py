import asyncio
import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from echo_node.about import About
from echo_node.config import NodeConfig
from echo_node.connections import NodeNetwork, open_connections
from echo_node.host.traffic import TrafficMeter
from echo_node.host.trouble_log import TroubleLog
from echo_shared.errors import SwarmError
from tests.echo_node.test_about import about

__all__ = ["about"]
LOOPBACK = "127.0.0.1"


def config(mesh_port: int = 0) -> NodeConfig:
    return NodeConfig(swarm_host=LOOPBACK, mesh_port=mesh_port)


def opened(about: About, mesh_port: int = 0) -> AbstractAsyncContextManager[NodeNetwork]:
    troubles = TroubleLog()
    meter = TrafficMeter(Path("nowhere") / "traffic.json", troubles)
    return open_connections(config(mesh_port), about, troubles, meter)


def listens(port: int) -> bool:
    with socket.socket() as prober:
        return prober.connect_ex((LOOPBACK, port)) == 0


async def test_a_node_listens_until_it_is_closed(about: About) -> None:
    async with opened(about) as connections:
        ports = connections.swarm.port, connections.mesh.port
        assert 0 not in ports and await asyncio.to_thread(listens, connections.mesh.port)
        assert connections.client.hub_key is None
    assert not await asyncio.to_thread(listens, ports[1])


async def test_a_port_that_is_taken_is_reported_and_nothing_stays_open(about: About) -> None:
    async with opened(about) as first:
        taken = first.mesh.port
        with pytest.raises(SwarmError, match="cannot listen"):
            async with opened(about, taken):
                pass
        assert await asyncio.to_thread(listens, taken)
    async with opened(about, taken) as again:
        assert again.mesh.port == taken
