"""Connects a node to a helper's device server, which listens only on loopback and does not check its clients.

The helper's relay accepts TLS connections, asks each for the secret, and serves one node at a time. The node's tunnel
is a local port for llama.cpp's library; it checks the helper's certificate before it sends the secret. After one line
of JSON each way, bytes pass unchanged. A node on the helper's own machine needs no secret.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_node.lending.pairing import HelperAddress, Pairing, client_context
from echo_shared.errors import BackendError, ConfigError, EchoError
from echo_shared.wire.sockets import is_loopback

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
HANDSHAKE_S: Final = 10.0
START_S: Final = 120.0
"""Seconds within which a helper's device server must start."""
LEAVING_S: Final = 5.0
"""Seconds that a new connection waits for the end of the previous one; both may come from the same node."""
REPORT_S: Final = 60.0
WARNING_EVERY_S: Final = 1.0
"""Shortest time in seconds between two warnings with the same reason."""
MOST_UNPROVEN: Final = 32
"""Maximum number of connections that have not sent the secret yet. One more ends the oldest of them, so a stranger can
neither fill the helper's memory nor keep its node out."""
_LINE_BYTES: Final = 4_096
_TEXT: Final = 512
_BUFFER_BYTES: Final = 2**20
_KEEPALIVE: Final = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPALIVE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 120_000,
}
_BROKEN_OFF: Final = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValidationError)
_MIB: Final = 2**20


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class TunnelRequest(_Line):
    """A node's request to use the helper's device."""

    secret: Annotated[str, Field(max_length=64)]
    """The helper's secret in hexadecimal; empty if the node runs on the helper's own machine."""


class TunnelAnswer(_Line):
    """The helper's answer. `what` and `do` explain a failure."""

    status: Literal["lent", "busy", "wrong_code", "broken"]
    what: Annotated[str, Field(max_length=_TEXT)] = ""
    do: Annotated[str, Field(max_length=_TEXT)] = ""
    release: Annotated[str, Field(max_length=64)] = ""
    free_bytes: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """A helper's device server (llama.cpp's RPC server), which listens at a loopback port."""

    port: int
    release: str
    """Version of the helper's llama.cpp library. The node must have the same version."""
    free_bytes: tuple[int, ...]
    """Free bytes of each lent device."""


_L = TypeVar("_L", bound=_Line)


class _Leg(asyncio.Protocol):
    """One of two connections that are joined. Received bytes go to the other connection, and the end of either closes
    both.
    """

    def __init__(self, own: asyncio.Transport, other: asyncio.Transport) -> None:
        self.received = 0
        self.ended = asyncio.Event()
        self._other = other
        # If the other connection's buffer is full, reading from this one stops, so memory stays bounded.
        own.set_write_buffer_limits(high=_BUFFER_BYTES)
        own.set_protocol(self)
        if own.is_closing():
            self.connection_lost(None)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self._other.write(data)

    def pause_writing(self) -> None:
        self._other.pause_reading()

    def resume_writing(self) -> None:
        self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        self._other.close()


class DeviceRelay:
    """The tunnel's end on the lending machine: it gives one node at a time access to the device server.

    `lend` starts a device server for each node, and ends it after the node has left.
    """

    def __init__(self, pairing: Pairing, lend: Callable[[], AbstractAsyncContextManager[Lent]]) -> None:
        self.refused = 0
        self._pairing = pairing
        self._tls = pairing.server_context()
        self._lend = lend
        self._warned_at: dict[str, float] = {}
        """Time of the last warning, by reason."""
        self._device = asyncio.Lock()
        self._lent_to = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unproven: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        """Connections without a valid secret so far and their tasks, oldest first."""

    @asynccontextmanager
    async def listening(self, host: str | None, port: int) -> AsyncIterator[int]:
        """Accept connections on `host` (None = all interfaces), and yield the port. Raises ConfigError."""
        try:
            server = await asyncio.start_server(self._connected, host, port, limit=_LINE_BYTES)
        except OSError as error:
            raise ConfigError(
                "The helper cannot listen at this address.",
                got=f"{host or 'all interfaces'}, port {port}: {error.strerror or error}",
                do="Choose another port with --port, or another address with --host.",
            ) from error
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # start_tls does not see bytes that came before it.
        _transport(writer).pause_reading()
        task = asyncio.create_task(self._handle(reader, writer))
        self._unproven[writer] = task
        if len(self._unproven) > MOST_UNPROVEN:
            oldest = next(iter(self._unproven))
            self._unproven.pop(oldest).cancel()
            self._count_refusal(oldest.get_extra_info("peername")[0], "it sent no code, and others connected")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: str = writer.get_extra_info("peername")[0]
        try:
            await self._admit_or_refuse(peer, reader, writer)
        except _BROKEN_OFF:
            self._count_refusal(peer, "it does not speak the node's protocol")
        except Exception:
            log.exception("The connection from %s failed.", peer)
        finally:
            self._unproven.pop(writer, None)
            writer.transport.abort()

    async def _admit_or_refuse(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HANDSHAKE_S):
            await writer.start_tls(self._tls)
            request = await _receive(reader, TunnelRequest)
        if not self.is_known(request.secret, peer):
            self._count_refusal(peer, "wrong code")
            await _refuse(writer, TunnelAnswer(status="wrong_code"))
            return
        self._unproven.pop(writer, None)
        try:
            async with asyncio.timeout(LEAVING_S):
                await self._device.acquire()
        except TimeoutError:
            self._count_refusal(peer, f"busy with {self._lent_to}")
            await _refuse(writer, TunnelAnswer(status="busy"))
            return
        try:
            self._lent_to = peer
            await self._serve(peer, writer)
        except EchoError as error:
            log.warning("Cannot lend to %s: %s", peer, error)
            await _refuse(writer, TunnelAnswer(status="broken", what=error.what[:_TEXT], do=(error.do or "")[:_TEXT]))
        finally:
            self._device.release()

    def is_known(self, secret: str, peer: str) -> bool:
        """Return True if the node at the address `peer` sent the right secret (hexadecimal), or runs on
        this machine.
        """
        if not secret and is_loopback(peer):
            return True
        return hmac.compare_digest(secret.encode(), self._pairing.code.secret.hex().encode())

    def _count_refusal(self, peer: str, why: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._warned_at.get(why, -WARNING_EVERY_S) < WARNING_EVERY_S:
            return  # A stranger must not fill the disk with these lines. The next one has the number of refusals.
        self._warned_at[why] = now
        log.warning("Refused %s: %s (%d so far).", peer, why, self.refused)

    async def _serve(self, peer: str, writer: asyncio.StreamWriter) -> None:
        """Serve one node until it leaves. Raises EchoError if the device server does not start."""
        began = time.monotonic()
        async with self._lend() as lent:
            local = await _connect_locally(lent.port)
            try:
                _send(writer, TunnelAnswer(status="lent", release=lent.release, free_bytes=list(lent.free_bytes)))
                log.info("Lent to %s.", peer)
                inward, outward = _join(_transport(writer), local)
                await _follow(peer, inward, outward)
            finally:
                local.abort()
        minutes = (time.monotonic() - began) / 60
        log.info("%s has left after %.1f minutes: %s.", peer, minutes, _volume(inward, outward))


async def _connect_locally(port: int) -> asyncio.Transport:
    try:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, LOOPBACK, port)
    except OSError as error:
        raise BackendError("The device server does not answer.", got=str(error)) from error
    return transport


@asynccontextmanager
async def tunnel(address: HelperAddress, door: socket.socket | None = None) -> AsyncIterator[Lent]:
    """Open a local port for one connection to the helper's device server. Raises BackendError.

    `door`: a listening loopback socket to use as that port; it is closed at the end.
    """
    door = door or socket.create_server((LOOPBACK, 0))
    with door:
        async with _tunnel(address, door) as lent:
            yield lent


@asynccontextmanager
async def _tunnel(address: HelperAddress, door: socket.socket) -> AsyncIterator[Lent]:
    reader, writer = await _connect(address)
    joined: list[_Leg] = []
    passing: asyncio.Task[None] | None = None
    try:
        answer = await _introduce(address, reader, writer)
        passing = asyncio.create_task(_accept_one(door, _Acceptor(_transport(writer), joined)))
        port: int = door.getsockname()[1]
        yield Lent(port=port, release=answer.release, free_bytes=tuple(answer.free_bytes))
    finally:
        if passing is not None:
            passing.cancel()
            await asyncio.wait([passing])
        writer.transport.abort()
        for leg in joined:
            await leg.ended.wait()


async def _accept_one(door: socket.socket, acceptor: _Acceptor) -> None:
    """Accept one connection, which llama.cpp's library opens."""
    loop = asyncio.get_running_loop()
    door.setblocking(False)
    connection, _ = await loop.sock_accept(door)
    await loop.connect_accepted_socket(lambda: acceptor, connection)


class _Acceptor(asyncio.Protocol):
    """Protocol of a local connection: as soon as the connection is made, join it with `remote`, and add both to
    `joined`.
    """

    def __init__(self, remote: asyncio.Transport, joined: list[_Leg]) -> None:
        self._remote = remote
        self._joined = joined

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._joined.extend(_join(transport, self._remote))


async def _connect(address: HelperAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            return await asyncio.open_connection(
                address.host,
                address.port,
                limit=_LINE_BYTES,
                ssl=client_context(),
                ssl_shutdown_timeout=HANDSHAKE_S,
            )
    except OSError as error:
        raise BackendError(
            "A helper cannot be reached.",
            got=f"{address}: {error or 'no answer'}",
            do="Start it on the helper with: echo-node lend. Or join without it: omit its --with.",
            code="helper_away",
        ) from error


async def _introduce(
    address: HelperAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> TunnelAnswer:
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if address.code is not None and not address.code.is_of(certificate):
        raise _wrong_code(address, "another certificate than the code's")
    try:
        _send(writer, TunnelRequest(secret="" if address.code is None else address.code.secret.hex()))
        async with asyncio.timeout(START_S):
            answer = await _receive(reader, TunnelAnswer)
    except _BROKEN_OFF as error:
        raise BackendError(
            "The server at a helper's address is not a helper.",
            got=f"{address}: {type(error).__name__}",
            do="Compare host and port with the output of `echo-node lend`.",
            code="helper_unknown",
        ) from error
    if answer.status == "wrong_code":
        raise _wrong_code(address, "refused")
    if answer.status == "busy":
        raise BackendError(
            "A helper is lent to another node.",
            got=str(address),
            do="Stop the other node, or join without this helper. The node retries by itself.",
            code="helper_busy",
        )
    if answer.status == "broken":
        raise BackendError(
            f"A helper cannot lend its device: {answer.what}",
            got=str(address),
            do=f"On the helper: {answer.do}" if answer.do else "See the output of `echo-node lend` there.",
            code="helper_broken",
        )
    return answer


def _wrong_code(address: HelperAddress, got: str) -> BackendError:
    return BackendError(
        "A helper does not accept this code.",
        got=f"{address}: {got}",
        do="Copy HOST:PORT#CODE again from the output of `echo-node lend` on the helper.",
        code="helper_wrong_code",
    )


async def _receive(reader: asyncio.StreamReader, kind: type[_L]) -> _L:
    return kind.model_validate_json(await reader.readuntil(b"\n"))


def _send(writer: asyncio.StreamWriter, line: _Line) -> None:
    writer.write(line.model_dump_json().encode() + b"\n")


async def _refuse(writer: asyncio.StreamWriter, answer: TunnelAnswer) -> None:
    _send(writer, answer)
    writer.close()
    with suppress(OSError):  # If the node has already left, the connection ends anyway.
        async with asyncio.timeout(HANDSHAKE_S):
            await writer.wait_closed()


def _join(one: asyncio.Transport, other: asyncio.Transport) -> tuple[_Leg, _Leg]:
    return _Leg(one, other), _Leg(other, one)


async def _follow(peer: str, inward: _Leg, outward: _Leg) -> None:
    """Wait until both connections have ended. Log the traffic from time to time."""
    said = ""
    while True:
        try:
            async with asyncio.timeout(REPORT_S):
                await inward.ended.wait()
                await outward.ended.wait()
                return
        except TimeoutError:
            if (moved := _volume(inward, outward)) != said:
                log.info("Lent to %s: %s.", peer, moved)
                said = moved


def _volume(inward: _Leg, outward: _Leg) -> str:
    return f"{inward.received / _MIB:.1f} MiB in, {outward.received / _MIB:.1f} MiB out"


def _transport(writer: asyncio.StreamWriter) -> asyncio.Transport:
    """Return the connection's transport, with keepalive on: the system ends the connection half a minute after the peer
    has vanished.
    """
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    assert isinstance(writer.transport, asyncio.Transport)
    return writer.transport
