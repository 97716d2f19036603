"""The node's connection to its hub: handshake, messages both ways, and reconnects.

The handshake is two requests (`echo_shared.wire.credentials`). The hub answers the first with its challenge; the second
becomes the websocket. The hub has proven its key before the second request, so no other server gets the invite token.

Every wait for the hub has a deadline: `CONNECT_S` per request, `WELCOME_S` for the Welcome, `SEND_S` per send, and
`PING_S` for the websocket's ping. The node disconnects from a hub that misses a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import ssl
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.datastructures import MultipleValuesError
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.http11 import Response

import echo_shared
from echo_node.core.clocks import HubClock
from echo_node.core.events import Disconnected, Incoming
from echo_node.core.troubles import Trouble, TroubleCode, trouble_of
from echo_node.host.address import HubAddress
from echo_node.host.clock import running_s
from echo_node.host.trouble_log import TroubleLog
from echo_node.net.flow import Flow
from echo_node.net.hub_connection import connection_to
from echo_node.net.online import Online
from echo_node.net.receiver import Receiver
from echo_node.net.tls import handshake_failure
from echo_shared.errors import ConnectError, EchoError, RefusedError, RemoteProtocolError
from echo_shared.installation import how_to_upgrade
from echo_shared.process.backoff import backoff_s
from echo_shared.signing.identity import Identity, node_id
from echo_shared.wire.credentials import REFUSED_TYPE, Credentials, challenge_of
from echo_shared.wire.messages import (
    MAX_FRAME_BYTES,
    Challenge,
    FromHub,
    FromNode,
    Piece,
    RefusalCode,
    Refused,
    Welcome,
)
from echo_shared.wire.messages.fields import printable_line
from echo_shared.wire.sessions import UPGRADE_NODE, NodeSession

log = logging.getLogger(__name__)

CONNECT_S: Final = 15.0
WELCOME_S: Final = 20.0
SEND_S: Final = 30.0
OWNER_S: Final = 0.25
"""Seconds for which all sends together may wait for the hub once the owner needs the machine."""
OWNER_FIRST_S: Final = 5.0
"""Seconds for which sends are limited to OWNER_S after the owner has needed the machine."""
PING_S: Final = 20.0
CLOSE_S: Final = 2.0
STEADY_S: Final = 30.0
"""Seconds after which a connection counts as good: after its loss, the first retry follows quickly again."""

MOST_SHOWN: Final = 300
"""Maximum characters of a peer's invalid input that an error shows."""

_PART: Final = "the connection"
_READ_AHEAD_BYTES: Final = 2**23
"""Bytes that may arrive before they are read: 16 frames, and the sockets' buffers."""
HUB_KEY_CHANGED: Final = "hub_key_changed"
FATAL: Final = frozenset(
    {
        HUB_KEY_CHANGED,
        RefusalCode.BAD_TOKEN,
        RefusalCode.BAD_SIGNATURE,
        RefusalCode.BANNED,
        RefusalCode.ALREADY_CONNECTED,
        RefusalCode.FINISHED,
        RefusalCode.NAME_TAKEN,
    }
)
"""Codes of the hub's refusals that a retry cannot change: `HubClient.run` ends with them."""
UPGRADE_S: Final = 3_600.0
"""Seconds between attempts while the node's or the hub's software is too old: somebody must upgrade it first."""

BANNED_DO: Final = "Ask the hub's operator to admit this node again. The node does not retry by itself."


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """Data about the node for the hub, sent in the handshake."""

    name: str
    invite_token: str | None
    backend: str
    device: str
    swarm_port: int
    mesh_port: int
    cost_per_hour: float = 0.0
    power_watts: float = 0.0
    owner: Identity | None = None
    punches: bool = False
    """True: the node can link with other nodes by hole punching through routers."""
    answers: bool = True
    """False: the node does not work for the hub's tenants (other people, whose programs sample on its nodes)."""
    refuses: tuple[str, ...] = ()
    """Names of tenants for which the node does not work."""


class HubClient:
    """Client of one hub, with one connection at a time. `run` receives; `send` may be called from any task."""

    def __init__(
        self,
        address: HubAddress,
        *,
        me: Identity,
        introduction: Introduction,
        pinned_hub_key: bytes | None,
        retry_first_s: float,
        troubles: TroubleLog | None = None,
        flow: Flow | None = None,
        stays: bool = False,
    ) -> None:
        """`stays`: True = keep trying to connect to a hub whose run has finished, because its operator may extend the
        run.
        """
        self.address = address
        self._me = me
        self._introduction = introduction
        self._retry_first_s = retry_first_s
        self._open: tuple[ClientConnection, NodeSession] | None = None
        self._welcomed_at: float | None = None
        self._troubles = troubles or TroubleLog()
        self._flow = flow or Flow()
        self._stays = stays
        self.line = Online()
        """Switch that is on while the node wants a connection. After switching it off, call `close` to end the current
        connection.
        """
        self._why: Trouble | None = None
        """Reason why this node itself has ended the connection."""
        self._hurry = asyncio.Event()
        self._sends: set[asyncio.Timeout] = set()
        """Deadlines of the sends that wait for the hub."""
        self._owner_first_until = -math.inf
        """Time until which sends are limited to `_left_s`, because the owner needs the machine."""
        self._left_s = 0.0
        """Seconds for which all sends together may still wait for the hub."""
        self.hub_clock = HubClock()
        self.hub_version = ""
        """The hub's release; empty = not known yet."""
        self.too_old = ""
        """The hub's refusal of this node as too old; empty = none, or the hub has admitted the node since."""
        self.hub_key = pinned_hub_key
        """The pinned key, from an earlier run or from the first handshake."""

    async def run(self, inbox: asyncio.Queue[Incoming], receiver: Receiver, *, patient: bool) -> None:
        """Put the hub's messages into the inbox, in order, and Disconnected after each loss. Reconnect forever.

        While the inbox is full, reading stops, so the hub waits as well. Pieces of artefacts go to the receiver, past
        the inbox. Raises RefusedError for a permanent refusal, and any error of the first connection unless `patient`.
        """
        attempt, loop = 0, asyncio.get_running_loop()
        while True:
            await self.line.wait()
            self._welcomed_at, self._why = None, None
            try:
                await self._converse(inbox, receiver)
            except RefusedError as error:
                failure: EchoError = error
                is_of_another_release = error.code == RefusalCode.PROTOCOL_VERSION
                may_be_extended = self._stays and error.code == RefusalCode.FINISHED
                if (error.code in FATAL and not may_be_extended) or (is_of_another_release and not patient):
                    raise _with_command(error) from error
                patient |= may_be_extended
                # The refusal TOO_SOON proves that the hub exists, so retries make sense.
                patient |= error.code == RefusalCode.TOO_SOON
            except (ConnectError, RemoteProtocolError) as error:
                failure = error
            if self._welcomed_at is not None:
                patient = True
                await inbox.put(Disconnected())
                attempt = 0 if loop.time() - self._welcomed_at > STEADY_S else attempt
            if not patient:
                raise failure
            if not self.line.is_on:
                continue
            if failure.code == RefusalCode.PROTOCOL_VERSION:
                self.too_old = failure.brief if _is_node_too_old(failure) else ""
                attempt = await self._wait_for_upgrade(_with_command(failure))
                continue
            self._troubles.begin(_PART, self._why or trouble_of(failure, otherwise=TroubleCode.HUB))
            attempt = await self._wait(attempt)

    async def _wait_for_upgrade(self, refusal: EchoError) -> int:
        """Report once how to upgrade the software that is too old, and wait for the upgrade. Return the number of the
        next attempt.
        """
        said = f"{refusal.brief} The node asks again every hour. {refusal.do or ''}"
        self._troubles.begin(_PART, Trouble(TroubleCode.TOO_OLD, said.rstrip()))
        await self._pause(UPGRADE_S * (1.0 - random.random() / 2))
        return 0

    async def _wait(self, attempt: int) -> int:
        """Wait before the next attempt. `attempt`: number of earlier failures, which decides the wait. Return the new
        number.
        """
        if self._hurry.is_set():
            attempt = 0  # Earlier failures no longer count: they were on another network, or hours ago.
        self._hurry.clear()
        wait_s = backoff_s(attempt, random.random(), first_s=self._retry_first_s)
        log.info("Retrying in %.1f s.", wait_s)
        return 0 if await self._pause(wait_s) else attempt + 1

    async def _pause(self, wait_s: float) -> bool:
        """Wait `wait_s` seconds. Return True if `reconnect` has cut the wait short."""
        try:
            async with asyncio.timeout(wait_s):
                await self._hurry.wait()
        except TimeoutError:
            return False
        self._hurry.clear()
        return True

    @property
    def own_address(self) -> str | None:
        """This machine's own address on the open connection to the hub; None without a connection."""
        if self._open is None:
            return None
        address: str = self._open[0].local_address[0]
        return address.partition("%")[0]

    def reconnect(self, why: Trouble) -> None:
        """Abort the open connection without a message to the hub. The next attempt follows soon."""
        self._hurry.set()
        if self._open is not None:
            self._why = why
            self._open[0].transport.abort()

    async def send(self, message: FromNode) -> None:
        """Send the message. Without an open connection it is dropped."""
        if self._open is None:
            return
        socket, session = self._open
        frame = session.send(message)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._left_s if began < self._owner_first_until else SEND_S) as deadline:
                self._sends.add(deadline)
                try:
                    await socket.send(frame)
                finally:
                    self._sends.discard(deadline)
                    self._left_s = max(0.0, self._left_s - (loop.time() - began))
            self._flow.sent(len(frame))
        except ConnectionClosed:
            log.debug("a %s was not sent: the connection is closed", message.type)
        except TimeoutError:
            log.warning("The hub has read nothing for %.1f s: disconnecting.", loop.time() - began)
            socket.transport.abort()

    def put_owner_first(self) -> None:
        """Limit all sends of the next OWNER_FIRST_S seconds, and those that wait now, to OWNER_S seconds together. A
        hub that reads too slowly is then disconnected. Call this when the owner needs the machine or stops the node:
        the node handles one event at a time, so the owner would otherwise wait behind the sends.
        """
        now = asyncio.get_running_loop().time()
        self._owner_first_until, self._left_s = now + OWNER_FIRST_S, OWNER_S
        for deadline in self._sends:
            if not deadline.expired():
                deadline.reschedule(min(now + OWNER_S, deadline.when() or math.inf))

    async def close(self) -> None:
        """Close the open connection in good order. `run` then reconnects, unless it is cancelled."""
        if self._open is not None:
            await self._open[0].close()

    async def introduce(self, introduction: Introduction) -> None:
        self._introduction = introduction
        await self.close()

    async def _converse(self, inbox: asyncio.Queue[Incoming], receiver: Receiver) -> None:
        """Run one connection until its end, which is always an exception."""
        session = NodeSession(
            me=self._me,
            pinned_hub_key=self.hub_key,
            software_version=echo_shared.__version__,
            nonce=secrets.token_bytes(32),
        )
        introduction = self._introduction
        socket = await self._prove(session, introduction)
        try:
            try:
                async with asyncio.timeout(WELCOME_S):
                    welcome = await self._welcome(socket, session)
            except TimeoutError as error:
                raise ConnectError("The hub did not finish the handshake in time.", got=self.address.origin) from error
            self._open = (socket, session)
            if introduction is not self._introduction:  # The introduction has changed during the handshake.
                await socket.close()
            self._welcomed_at = asyncio.get_running_loop().time()
            self._troubles.end(_PART)
            self.too_old = ""
            await inbox.put(welcome)
            while True:
                message = await self._receive(socket, session)
                if isinstance(message, Piece):
                    receiver.take(message, None)
                else:
                    await inbox.put(message)
        finally:
            self._open = None
            await socket.close()

    async def _prove(self, session: NodeSession, introduction: Introduction) -> ClientConnection:
        """Open a websocket, after both ends have proven their identity."""
        hello = session.hello()
        answer = await self._ask(Credentials(hello=hello))
        if isinstance(answer, ClientConnection):
            answer.transport.abort()
            raise RefusedError(
                "The hub did not ask for this node's identity: it is older than this node.",
                got=self.address.origin,
                do="Ask the hub's operator to upgrade it.",
                code=RefusalCode.PROTOCOL_VERSION,
            )
        challenge = self._challenge(answer, session)
        self.hub_key = session.hub_key
        proof = session.proof(
            name=introduction.name,
            invite_token=introduction.invite_token,
            backend=introduction.backend,
            device=introduction.device,
            swarm_port=introduction.swarm_port,
            mesh_port=introduction.mesh_port,
            cost_per_hour=introduction.cost_per_hour,
            power_watts=introduction.power_watts,
            owner=introduction.owner,
            punches=introduction.punches,
            answers=introduction.answers,
            refuses=introduction.refuses,
        )
        answer = await self._ask(Credentials(hello=hello, nonce=challenge.nonce, proof=proof))
        if isinstance(answer, Response):
            raise self._not_let_in(answer, session)
        return answer

    async def _ask(self, credentials: Credentials) -> ClientConnection | Response:
        """Send a request with these credentials. Return the websocket, or the hub's other answer."""
        try:
            return await connect(
                self.address.websocket,
                create_connection=connection_to(self.address, credentials),
                open_timeout=CONNECT_S,
                ping_interval=PING_S,
                ping_timeout=self._ping_timeout_s,
                close_timeout=CLOSE_S,
                max_size=MAX_FRAME_BYTES,
                compression=None,
                proxy=None if self.address.is_loopback else True,  # True: use the environment's proxy.
            )
        except InvalidStatus as error:
            return error.response
        except ssl.SSLError as error:
            raise handshake_failure(error, self.address) from error
        # ValueError and MultipleValuesError: the server redirects to something that is no address.
        except (OSError, InvalidHandshake, InvalidURI, EOFError, ValueError, MultipleValuesError) as error:
            got = "no answer in time" if isinstance(error, TimeoutError) else _shown(error) or type(error).__name__
            raise ConnectError(
                "The hub cannot be reached.",
                got=f"{self.address.origin}: {got}",
                do="Check the address, your network, and that the hub runs.",
            ) from error

    @property
    def _ping_timeout_s(self) -> float:
        """Seconds to wait for the answer to a ping. A download limit extends it, because the answer waits behind
        earlier data.
        """
        rate = self._flow.download_bytes_s
        return PING_S + (_READ_AHEAD_BYTES / rate if rate else 0.0)

    def _challenge(self, answer: Response, session: NodeSession) -> Challenge:
        """Return the hub's challenge. Raises the error of `_not_let_in` for any other answer."""
        self._note_time(answer)
        for header in answer.headers.get_all("WWW-Authenticate"):
            if (frame := challenge_of(header)) is not None:
                message = session.receive(frame)
                assert isinstance(message, Challenge | Refused)  # The session allows no other message in this state.
                if isinstance(message, Challenge):
                    self.hub_version = message.software_version
                    return message
        raise self._not_let_in(answer, session)

    def _note_time(self, answer: Response) -> None:
        """Learn the hub's time of day from the HTTP header Date."""
        try:
            told = parsedate_to_datetime(answer.headers.get("Date", ""))
        except (ValueError, OverflowError, MultipleValuesError):
            return
        if told.tzinfo is not None:
            self.hub_clock.tell(told.timestamp(), running=running_s())

    def _not_let_in(self, answer: Response, session: NodeSession) -> EchoError:
        """Return the error for an HTTP answer without a challenge or a websocket."""
        if answer.headers.get_all("Content-Type") == [REFUSED_TYPE]:
            message = session.receive(bytes(answer.body or b""))
            if isinstance(message, Refused):
                return _refusal(message)
        return ConnectError(
            "There is no Echo hub at this address.",
            got=f"{self.address.origin} answered with HTTP status {answer.status_code}",
            do="Check the address, and that the hub runs.",
        )

    async def _welcome(self, socket: ClientConnection, session: NodeSession) -> Welcome:
        message = await self._receive(socket, session)
        assert isinstance(message, Welcome)  # The session allows no other message in this state.
        assert session.hub_key is not None
        _check_run_id(message.run_id, session.hub_key)
        return message

    async def _receive(self, socket: ClientConnection, session: NodeSession) -> FromHub:
        """Return the next message. Raises RefusedError for a refusal, and ConnectError if the connection is lost."""
        try:
            frame = await socket.recv()
        except ConnectionClosed as error:
            raise self._lost(error) from error
        await self._flow.received(len(frame))
        if isinstance(frame, str):
            raise RemoteProtocolError("The hub sent text instead of a message.", got=_shown(frame[:80]))
        message = session.receive(frame)
        if isinstance(message, Refused):
            raise _refusal(message)
        return message

    def _lost(self, error: ConnectionClosed) -> ConnectError:
        return ConnectError(
            "The connection to the hub is lost.",
            got=f"{self.address.origin}: {_shown(error)}",
            do="The node reconnects by itself.",
        )


def _is_node_too_old(error: EchoError) -> bool:
    """Return True if the node needs the upgrade, not the hub."""
    return error.code == RefusalCode.PROTOCOL_VERSION and error.do in (None, "", UPGRADE_NODE)


def _with_command(error: EchoError) -> EchoError:
    """Replace the advice of a refusal that calls the node too old by this copy's upgrade command."""
    if _is_node_too_old(error):
        return RefusedError(error.what, got=error.got, do=how_to_upgrade(), code=error.code)
    return error


def _refusal(message: Refused) -> RefusedError:
    do = message.do or (BANNED_DO if message.code == RefusalCode.BANNED else None)
    return RefusedError(f"The hub says: {message.what}", do=do, code=message.code)


def _check_run_id(run_id: str, hub_key: bytes) -> None:
    """Check that the run is the hub's own. The run id names files on disk, so a hub must not name another hub's run."""
    own = node_id(hub_key)
    if run_id != own and not run_id.startswith(f"{own}-"):
        raise RemoteProtocolError(
            "The hub names a run that is not its own.",
            got=f"run {run_id!r}, key {own}",
            do="Tell the hub's operator: its software must be as new as this node's.",
        )


def _shown(said: object) -> str:
    return printable_line(str(said))[:MOST_SHOWN]
