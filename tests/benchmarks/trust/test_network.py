from __future__ import annotations

import asyncio

import pytest

from benchmarks.trust import network
from benchmarks.trust.protocol import Unnoticed


def test_what_is_held_for_nobody_is_bounded() -> None:
    assert network.bounded(network.MOST_GROWTH_BYTES, "cut off").endswith("; cut off")
    with pytest.raises(Unnoticed, match="MB more in memory"):
        network.bounded(network.MOST_GROWTH_BYTES + 1, "cut off")


async def test_a_connection_that_stays_is_said() -> None:
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_server(lambda _, writer: accepted.put_nowait(writer), "127.0.0.1", 0)
    opened = [await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])]
    with pytest.raises(Unnoticed, match="1 of 1 are still open"):
        await network.all_closed(opened, within_s=0.0)
    for writer in (opened[0][1], await accepted.get()):
        writer.close()
        await writer.wait_closed()
    server.close()
