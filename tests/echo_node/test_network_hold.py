"""Once the owner's rules forbid the network, a node sends its pending messages and disconnects; a node that starts
under such a rule makes no connection.
"""

import asyncio
from types import SimpleNamespace

from echo_node.about import About
from echo_node.network_hold import NetworkHold
from tests.echo_node.test_about import about
from tests.echo_node.test_connections import opened

__all__ = ["about"]


async def test_pending_messages_are_sent_before_the_node_disconnects(about: About) -> None:
    run = SimpleNamespace(owes_the_hub=True)
    async with asyncio.timeout(60), opened(about) as connections:
        hold = NetworkHold(connections, run)  # type: ignore[arg-type]
        hold.turn(online=True)
        assert connections.bulk.is_on and connections.client.line.is_on
        hold.turn(online=False)
        hold.turn(online=False)
        assert not connections.bulk.is_on and connections.client.line.is_on
        run.owes_the_hub = False
        while connections.client.line.is_on:  # noqa: ASYNC110
            await asyncio.sleep(0)
        hold.turn(online=True)
        assert connections.bulk.is_on and connections.client.line.is_on


async def test_a_node_that_begins_under_a_hold_makes_no_connection(about: About) -> None:
    async with opened(about) as connections:
        await NetworkHold(connections, SimpleNamespace()).begin()  # type: ignore[arg-type]
        assert not connections.bulk.is_on and not connections.client.line.is_on
