"""`echo-node lend`, which makes this machine a helper (it lends memory or GPU to a node): its output, its loans, and a
clean end.
"""

from __future__ import annotations

import asyncio
import re
import signal
from typing import Any

import psutil
import pytest

from echo_node.lending.pairing import HelperAddress
from echo_node.lending.tunnel import LOOPBACK, tunnel
from echo_shared.errors import BackendError

pytest.importorskip("llama_cpp")


async def lend(site: Any, *flags: str) -> tuple[Any, str]:
    """Start the command; return its process and the value that it prints for `--with`."""
    where = ("--host", LOOPBACK, "--port", "0", "--threads", "1", "--data-dir", site.root / "helper")
    helper = await site.start("echo_node.main", "lend", *where, *flags)
    return helper, (await helper.printed(r"echo-node join URL --with (\S+#\S+)"))[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_lend_stops_cleanly_and_leaves_nothing(site: Any, number: int) -> None:
    helper, printed = await lend(site)
    address = HelperAddress.parse(printed)
    process = psutil.Process(helper.process.pid)
    assert process.children() == []  # Without a loan, the helper starts no device server, so no memory is occupied.
    async with tunnel(address) as lent:
        (server,) = process.children()
        assert server.nice() > process.nice()
        reader, writer = await asyncio.open_connection(LOOPBACK, lent.port)
        status, said = await helper.end(number)
        assert await reader.read() == b""
        writer.close()
    assert status == 0 and "Traceback" not in said, said
    assert "Lent to 127.0.0.1." in said and f"Stopping: got {signal.Signals(number).name}." in said
    assert not server.is_running()


async def test_a_device_server_ends_with_a_helper_that_is_killed(site: Any) -> None:
    helper, printed = await lend(site)
    async with tunnel(HelperAddress.parse(printed)):
        (server,) = psutil.Process(helper.process.pid).children()
        await helper.kill()
    assert await asyncio.to_thread(psutil.wait_procs, [server], 20) == ([server], [])


async def test_the_code_stays_and_no_more_is_lent_than_allowed(site: Any) -> None:
    helper, printed = await lend(site)
    await helper.end()
    helper, again = await lend(site, "--memory-limit", "0.25")
    assert HelperAddress.parse(again).code == HelperAddress.parse(printed).code
    async with tunnel(HelperAddress.parse(again)) as lent:
        assert abs(sum(lent.free_bytes) - 2**28) < 64
    await helper.end()


async def test_a_node_that_takes_too_much_memory_is_disconnected(site: Any) -> None:
    """Here the memory limit is below what the device server itself needs, so the node loses its connection at once."""
    helper, printed = await lend(site, "--memory-limit", "0.001")
    async with tunnel(HelperAddress.parse(printed)) as lent:
        reader, writer = await asyncio.open_connection(LOOPBACK, lent.port)
        assert await reader.read() == b""
        writer.close()
    await helper.printed("more than is lent: it is disconnected")
    await helper.end()


async def test_only_the_code_opens(site: Any) -> None:
    helper, printed = await lend(site)
    _, other = await lend(Elsewhere(site))
    address = HelperAddress.parse(printed)
    foreign = HelperAddress(host=address.host, port=address.port, code=HelperAddress.parse(other).code)
    with pytest.raises(BackendError, match="does not accept this code"):
        async with tunnel(foreign):
            pass
    await helper.printed(r"Refused 127\.0\.0\.1")
    await helper.end()


class Elsewhere:
    """The test's site, but with another data directory, so that a helper started here makes another pairing code."""

    def __init__(self, site: Any) -> None:
        self.root = site.root / "elsewhere"
        self.start = site.start


async def test_a_port_in_use_is_reported(site: Any) -> None:
    helper, printed = await lend(site)
    port = str(HelperAddress.parse(printed).port)
    status, said = await site.command(
        "echo_node.main", "lend", "--host", LOOPBACK, "--port", port, "--data-dir", site.root / "second"
    )
    assert status == 1 and re.search("The helper cannot listen at this address", said), said
    await helper.end()
