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
from echo_shared.wire.messages import MeshPeer
from tests.echo_node.net.mesh_parts import KEY, News, Node
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
    # Do not open the port as a check: another process may have it by now.
    assert not await asyncio.to_thread(listens, taken)


async def test_a_chosen_port_is_used(about: About) -> None:
    with socket.socket() as taken:  # Reserve the port against other processes. This socket does not listen.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((LOOPBACK, 0))
        async with opened(about, taken.getsockname()[1]) as connections:
            assert connections.mesh.port == taken.getsockname()[1]
            assert await asyncio.to_thread(listens, connections.mesh.port)


@pytest.mark.parametrize("is_named_offline", [False, True])
async def test_a_node_that_was_offline_for_a_moment_links_again(
    about: About, tmp_path: Path, is_named_offline: bool
) -> None:
    """The hub's connection outlasts a short pause, and the hub names the peers only after a change."""
    news = News()
    other = Node(news, tmp_path)
    await other.open()
    async with opened(about) as connections:
        me = MeshPeer(node_id=about.me.node_id, host=LOOPBACK, port=connections.mesh.port, number=0)
        other.mesh.set_peers([me])
        connections.mesh.set_keys([KEY])
        if not is_named_offline:
            connections.use_mesh([other.peer])
            await news.until(lambda: other.mesh.links == (me.node_id,))
        connections.set_online(False)
        if is_named_offline:
            connections.use_mesh([other.peer])
        await news.until(lambda: other.mesh.links == ())
        connections.set_online(True)
        await news.until(lambda: other.mesh.links == (me.node_id,))
        await connections.hang_up()
        assert not connections.peers
    await other.close()
