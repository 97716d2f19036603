"""The encrypted tunnel from a node to a helper (a machine that lends its memory or GPU) over real sockets; an echo
server stands for the lent device.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from echo_node.lending.pairing import Code, HelperAddress, Pairing
from echo_node.lending.tunnel import LOOPBACK, MOST_UNPROVEN, DeviceRelay, Lent, tunnel
from echo_shared.errors import BackendError, ConfigError

PATIENCE_S = 60.0


class Device:
    def __init__(self) -> None:
        self.lent = 0
        self.present = 0
        self.broken = False
        self.connections: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Lent]:
        if self.broken:
            raise BackendError("There is no device.", do="Buy one.")
        server = await asyncio.start_server(self._echo, LOOPBACK, 0)
        self.lent += 1
        self.present += 1
        try:
            yield Lent(port=server.sockets[0].getsockname()[1], release="1.2.3", free_bytes=(5, 7))
        finally:
            self.present -= 1
            server.close()

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # Some tests end the relay on purpose.
        finally:
            writer.close()


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def relay(device: Device, tmp_path: Path) -> DeviceRelay:
    return DeviceRelay(Pairing.load_or_create(tmp_path / "lend.pem"), device.lend)


@pytest.fixture
async def address(relay: DeviceRelay, tmp_path: Path) -> AsyncIterator[HelperAddress]:
    async with asyncio.timeout(PATIENCE_S), relay.listening(LOOPBACK, 0) as port:
        yield HelperAddress(host=LOOPBACK, port=port, code=Pairing.load_or_create(tmp_path / "lend.pem").code)


async def exchange(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    writer.write(data)
    answer = await reader.readexactly(len(data))
    writer.close()
    await writer.wait_closed()
    return answer


async def refusal(address: HelperAddress) -> BackendError:
    with pytest.raises(BackendError) as caught:
        async with tunnel(address):
            pass
    return caught.value


async def test_bytes_pass_both_ways_unchanged(address: HelperAddress, device: Device) -> None:
    data = bytes(range(256)) * 2**15
    async with tunnel(address) as lent:
        assert (lent.release, lent.free_bytes) == ("1.2.3", (5, 7))
        assert await exchange(lent.port, data) == data
    async with tunnel(replace(address, code=None)) as lent:  # No code is needed on the helper's own machine.
        assert await exchange(lent.port, data) == data
    assert device.lent == 2


async def test_a_wrong_code_is_refused_and_counted(
    address: HelperAddress, relay: DeviceRelay, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    assert address.code is not None
    foreign = replace(address, code=Code(fingerprint=bytes(16), secret=address.code.secret))
    error = await refusal(foreign)
    assert error.code == "helper_wrong_code" and "another certificate" in str(error)
    guessed = replace(address, code=replace(address.code, secret=bytes(16)))
    for count in (1, 2):
        with caplog.at_level(logging.WARNING):
            assert "does not accept this code" in (await refusal(guessed)).what
        # The relay also counts the connection with the foreign code, which the client ended at the wrong certificate.
        assert relay.refused == count + 1
    assert "wrong code" in caplog.text
    assert device.lent == 0


async def test_the_secret_is_needed_from_other_machines(address: HelperAddress, relay: DeviceRelay) -> None:
    assert address.code is not None
    secret = address.code.secret.hex()
    assert relay.is_known("", LOOPBACK) and relay.is_known("", "::1") and relay.is_known(secret, "192.168.1.7")
    assert not relay.is_known("", "192.168.1.7")
    assert not relay.is_known("ä", "192.168.1.7")
    assert not relay.is_known(secret[:-1], LOOPBACK)


async def test_one_node_at_a_time(
    address: HelperAddress, relay: DeviceRelay, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo_node.lending.tunnel.LEAVING_S", 0.1)
    async with tunnel(address) as first:
        error = await refusal(address)
        assert error.code == "helper_busy" and "lent to another node" in error.what
        assert await exchange(first.port, b"still here") == b"still here"
    monkeypatch.undo()
    async with tunnel(address) as second:
        assert await exchange(second.port, b"now") == b"now"
    assert (device.lent, relay.refused) == (2, 1)


async def test_strangers_are_turned_away(address: HelperAddress, relay: DeviceRelay, device: Device) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"x" * 10_000, b'{"secret": 7}\n', b""):
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
        writer.write(said)
        if not said:
            writer.close()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.transport.abort()
    # The helper must not answer a connection without TLS.
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"\x0e" + bytes(32))
    assert len(await reader.read()) < 64
    writer.close()
    async with tunnel(address) as lent:
        assert await exchange(lent.port, b"and a node") == b"and a node"
    assert (relay.refused, device.lent) == (5, 1)


async def test_a_stranger_with_many_connections_keeps_no_node_out(
    address: HelperAddress, relay: DeviceRelay, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    silent = [await asyncio.open_connection(address.host, address.port) for _ in range(3 * MOST_UNPROVEN)]
    async with tunnel(address) as lent:
        assert await exchange(lent.port, b"and a node") == b"and a node"
        ended = [asyncio.create_task(reader.read()) for reader, _ in silent]
        await asyncio.wait(ended[: 2 * MOST_UNPROVEN])
        assert len([one for one in ended if not one.done()]) <= MOST_UNPROVEN
    assert device.lent == 1
    assert relay.refused >= 2 * MOST_UNPROVEN
    assert len([record for record in caplog.records if "Refused" in record.message]) < relay.refused / 2
    for reading, (_, writer) in zip(ended, silent, strict=True):
        reading.cancel()
        writer.transport.abort()


async def test_the_device_ends_and_so_does_the_tunnel(address: HelperAddress, device: Device) -> None:
    async with tunnel(address) as lent:
        reader, writer = await asyncio.open_connection(LOOPBACK, lent.port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        device.connections[0].transport.abort()
        assert await reader.read() == b""
        writer.close()
    async with tunnel(address) as lent:
        assert await exchange(lent.port, b"again") == b"again"


async def test_a_node_that_leaves_frees_the_device(address: HelperAddress, device: Device) -> None:
    for _ in range(3):
        async with tunnel(address) as lent:
            reader, writer = await asyncio.open_connection(LOOPBACK, lent.port)
            writer.write(bytes(2**20))
            await reader.readexactly(1)
            writer.transport.abort()
    assert device.lent == 3


async def test_the_helpers_error_is_reported_to_the_node(address: HelperAddress, device: Device) -> None:
    device.broken = True
    error = await refusal(address)
    assert "There is no device" in error.what and error.do == "On the helper: Buy one."


async def test_the_helper_stops_while_it_is_lent(device: Device, relay: DeviceRelay) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with relay.listening(LOOPBACK, 0) as port:
            lending = tunnel(HelperAddress(host=LOOPBACK, port=port, code=None))
            lent = await lending.__aenter__()
            reader, writer = await asyncio.open_connection(LOOPBACK, lent.port)
            writer.write(b"a")
            assert await reader.readexactly(1) == b"a"
        assert await reader.read() == b""
        writer.close()
        await lending.__aexit__(None, None, None)
    assert device.present == 0


async def test_a_missing_helper_is_reported() -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        port = silent.getsockname()[1]
    error = await refusal(HelperAddress(host=LOOPBACK, port=port, code=None))
    assert error.code == "helper_away" and "cannot be reached" in error.what and "echo-node lend" in str(error)


async def test_another_helper_at_the_address_is_refused(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 welcome\n")
        writer.close()

    context = Pairing.load_or_create(tmp_path / "lend.pem").server_context()
    server = await asyncio.start_server(answer, LOOPBACK, 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    assert "is not a helper" in (await refusal(HelperAddress(host=LOOPBACK, port=port, code=None))).what
    server.close()


async def test_a_port_that_is_taken_is_named(relay: DeviceRelay) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot listen at this address") as caught:
            async with relay.listening(LOOPBACK, port):
                pass
    assert str(port) in str(caught.value)


async def test_an_already_open_socket_is_used(address: HelperAddress) -> None:
    """A caged engine may not open sockets, so the node passes it an open one."""
    door = socket.create_server((LOOPBACK, 0))
    port = door.getsockname()[1]
    async with tunnel(address, door) as lent:
        assert lent.port == port
        assert await exchange(port, b"x" * 10_000) == b"x" * 10_000
    assert door.fileno() == -1
