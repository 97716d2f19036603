"""The node's one connection to its hub: handshake, messages both ways, and connecting again after a loss.

Every wait on the hub has a deadline: the handshake `HANDSHAKE_S`, a send `SEND_S`, and while nothing is said the
websocket's own ping, answered within `PING_S`. A hub that misses one is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

import echo_shared
from echo_node.core.events import Disconnected
from echo_node.host.address import HubAddress
from echo_node.net.tls import handshake_failure
from echo_shared.backoff import backoff_s
from echo_shared.errors import ConnectError, EchoError, RefusedError, RemoteProtocolError
from echo_shared.fields import printable_line
from echo_shared.identity import Identity, node_id
from echo_shared.messages import MAX_FRAME_BYTES, Challenge, FromHub, FromNode, Piece, RefusalCode, Refused, Welcome
from echo_shared.sessions import NodeSession

log = logging.getLogger(__name__)

CONNECT_S: Final = 15.0
HANDSHAKE_S: Final = 20.0
SEND_S: Final = 30.0
PING_S: Final = 20.0
CLOSE_S: Final = 2.0
STEADY_S: Final = 30.0
"""A connection that held this long was a good one: the next retry is again a quick one."""

MOST_SHOWN: Final = 300
"""Characters of what is not a message."""

HUB_KEY_CHANGED: Final = "hub_key_changed"
FATAL: Final = frozenset(
    {
        HUB_KEY_CHANGED,
        RefusalCode.BAD_TOKEN,
        RefusalCode.BAD_SIGNATURE,
        RefusalCode.BANNED,
        RefusalCode.PROTOCOL_VERSION,
        RefusalCode.ALREADY_CONNECTED,
        RefusalCode.FINISHED,
    }
)
"""Refusals that trying again does not change."""

BANNED_DO: Final = "Ask the hub's operator why, and to let this node in again. It will not try again by itself."

Deliver = Callable[[FromHub | Disconnected], Awaitable[None]]
Take = Callable[[Piece], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What the node says of itself."""

    name: str
    invite_token: str | None
    backend: str
    device: str
    swarm_port: int
    mesh_port: int
    cost_per_hour: float = 0.0
    power_watts: float = 0.0


class HubClient:
    """Runs one connection at a time. `run` receives; `send` may be called from any task."""

    def __init__(
        self,
        address: HubAddress,
        *,
        me: Identity,
        introduction: Introduction,
        pinned_hub_key: bytes | None,
        retry_first_s: float,
        jitter: Callable[[], float],
    ) -> None:
        self._address = address
        self._me = me
        self._introduction = introduction
        self._retry_first_s = retry_first_s
        self._jitter = jitter
        self._open: tuple[ClientConnection, NodeSession] | None = None
        self._welcomed_at: float | None = None
        self.hub_key = pinned_hub_key
        """Pinned: from before, or at the first handshake."""

    async def run(self, deliver: Deliver, *, take: Take, patient: bool) -> None:
        """Delivers what the hub says, in order, and Disconnected after each loss; connects again, for ever.

        `deliver` may wait: the hub then waits too. `take` gets the pieces of artefacts, which never wait. Raises
        RefusedError on a refusal that will not change, and, unless `patient`, whatever stopped the very first
        connection.
        """
        attempt, loop = 0, asyncio.get_running_loop()
        while True:
            self._welcomed_at = None
            try:
                await self._converse(deliver, take)
            except RefusedError as error:
                failure: EchoError = error
                if error.code in FATAL:
                    raise
            except (ConnectError, RemoteProtocolError) as error:
                failure = error
            if self._welcomed_at is not None:
                patient = True
                await deliver(Disconnected())
                attempt = 0 if loop.time() - self._welcomed_at > STEADY_S else attempt
            if not patient:
                raise failure
            wait_s = backoff_s(attempt, self._jitter(), first_s=self._retry_first_s)
            log.warning("%s (%s) Trying again in %.1f s.", failure.what, failure.got or failure.code, wait_s)
            await asyncio.sleep(wait_s)
            attempt += 1

    async def send(self, message: FromNode) -> None:
        """Sends, or drops the message when there is no open connection."""
        if self._open is None:
            return
        socket, session = self._open
        frame = session.send(message)
        try:
            async with asyncio.timeout(SEND_S):
                await socket.send(frame)
        except ConnectionClosed:
            log.debug("a %s was not sent: the connection is closed", message.type)
        except TimeoutError:
            log.warning("The hub has taken nothing for %.0f s: disconnecting.", SEND_S)
            socket.transport.abort()

    async def close(self) -> None:
        """Ends the open connection in good order; `run` then connects again, unless it is cancelled."""
        if self._open is not None:
            await self._open[0].close()

    async def introduce(self, introduction: Introduction) -> None:
        """What the node says of itself from now on; the hub learns it by a new connection."""
        self._introduction = introduction
        await self.close()

    async def _converse(self, deliver: Deliver, take: Take) -> None:
        """One connection from beginning to end, which is always an exception."""
        socket = await self._connect()
        introduction = self._introduction
        try:
            session = NodeSession(
                me=self._me,
                pinned_hub_key=self.hub_key,
                software_version=echo_shared.__version__,
                nonce=secrets.token_bytes(32),
            )
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    welcome = await self._handshake(socket, session, introduction)
            except TimeoutError as error:
                raise ConnectError("The hub did not finish the handshake in time.", got=self._address.origin) from error
            self._open = (socket, session)
            if introduction is not self._introduction:  # It has changed since the handshake began.
                await socket.close()
            self._welcomed_at = asyncio.get_running_loop().time()
            await deliver(welcome)
            while True:
                message = await self._receive(socket, session)
                if isinstance(message, Piece):
                    take(message)
                else:
                    await deliver(message)
        finally:
            self._open = None
            await socket.close()

    async def _connect(self) -> ClientConnection:
        try:
            return await connect(
                self._address.websocket,
                open_timeout=CONNECT_S,
                ping_interval=PING_S,
                ping_timeout=PING_S,
                close_timeout=CLOSE_S,
                max_size=MAX_FRAME_BYTES,
                compression=None,
                proxy=None if self._address.is_loopback else True,  # True: as the environment says.
            )
        except InvalidStatus as error:
            raise ConnectError(
                "There is no Echo hub at this address.",
                got=f"{self._address.origin} answered with HTTP status {error.response.status_code}",
                do="Check the address, and that the hub runs.",
            ) from error
        except ssl.SSLError as error:
            raise handshake_failure(error, self._address) from error
        except (OSError, InvalidHandshake, InvalidURI, EOFError) as error:
            got = "no answer in time" if isinstance(error, TimeoutError) else _shown(error) or type(error).__name__
            raise ConnectError(
                "The hub cannot be reached.",
                got=f"{self._address.origin}: {got}",
                do="Check the address, your network, and that the hub runs.",
            ) from error

    async def _handshake(self, socket: ClientConnection, session: NodeSession, introduction: Introduction) -> Welcome:
        await self._send_frame(socket, session.hello())
        message = await self._receive(socket, session)
        assert isinstance(message, Challenge)  # The session's state table allows nothing else here.
        assert session.hub_key is not None
        self.hub_key = session.hub_key
        await self._send_frame(
            socket,
            session.proof(
                name=introduction.name,
                invite_token=introduction.invite_token,
                backend=introduction.backend,
                device=introduction.device,
                swarm_port=introduction.swarm_port,
                mesh_port=introduction.mesh_port,
                cost_per_hour=introduction.cost_per_hour,
                power_watts=introduction.power_watts,
            ),
        )
        message = await self._receive(socket, session)
        assert isinstance(message, Welcome)
        _check_run_id(message.run_id, self.hub_key)
        return message

    async def _send_frame(self, socket: ClientConnection, frame: bytes) -> None:
        try:
            await socket.send(frame)
        except ConnectionClosed as error:
            raise self._lost(error) from error

    async def _receive(self, socket: ClientConnection, session: NodeSession) -> FromHub:
        """The next message. Raises RefusedError when it is one, ConnectError when the connection is gone."""
        try:
            frame = await socket.recv()
        except ConnectionClosed as error:
            raise self._lost(error) from error
        if isinstance(frame, str):
            raise RemoteProtocolError("The hub sent text where a message should be.", got=_shown(frame[:80]))
        message = session.receive(frame)
        if isinstance(message, Refused):
            do = message.do or (BANNED_DO if message.code == RefusalCode.BANNED else None)
            raise RefusedError(f"The hub says: {message.what}", do=do, code=message.code)
        return message

    def _lost(self, error: ConnectionClosed) -> ConnectError:
        return ConnectError(
            "The connection to the hub is lost.",
            got=f"{self._address.origin}: {_shown(error)}",
            do="The node connects again by itself.",
        )


def _check_run_id(run_id: str, hub_key: bytes) -> None:
    """Run ids name files on this disk: a hub may not name those of another hub's run."""
    own = node_id(hub_key)
    if run_id != own and not run_id.startswith(f"{own}-"):
        raise RemoteProtocolError(
            "The hub names a run that is not its own.",
            got=f"run {run_id!r}, key {own}",
            do="Tell the hub's operator: its software must be as new as this node's.",
        )


def _shown(said: object) -> str:
    """What a hub, or whoever answered in its place, said: safe to print, and not long."""
    return printable_line(str(said))[:MOST_SHOWN]
