"""Real connections to a hub that does not exist, while the test allows or forbids the use of the network."""

import asyncio

from echo_node.about import About
from echo_node.network_hold import NetworkHold
from tests.echo_node.test_about import about
from tests.echo_node.test_connections import opened

__all__ = ["about"]


async def test_pending_messages_are_sent_before_the_node_disconnects(about: About) -> None:
    wanted, owes = [False], [True]
    async with asyncio.timeout(60), opened(about) as connections:
        hold = NetworkHold(connections, is_wanted=lambda: wanted[0], owes_the_hub=lambda: owes[0])
        await hold.begin()
        hold.look()
        assert connections.bulk.is_on and connections.client.line.is_on
        wanted[0] = True
        hold.look()
        hold.look()
        assert not connections.bulk.is_on and connections.client.line.is_on
        owes[0] = False
        while connections.client.line.is_on:  # noqa: ASYNC110
            await asyncio.sleep(0)
        wanted[0] = False
        hold.look()
        assert connections.bulk.is_on and connections.client.line.is_on


async def test_a_node_that_begins_under_a_hold_makes_no_connection(about: About) -> None:
    async with opened(about) as connections:
        await NetworkHold(connections, is_wanted=lambda: True, owes_the_hub=lambda: True).begin()
        assert not connections.bulk.is_on and not connections.client.line.is_on
