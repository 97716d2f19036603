"""Authenticate nodes by HTTP, before their connection becomes a websocket.

The first request carries the node's Hello; the hub's answer carries its Challenge. The second request carries Hello and
Proof (`echo_shared.wire.credentials`). Protocol version, nonce, signature, invite and bans are checked here. The hub
stores nothing between the two requests, so a refused client costs it one request of a few kilobytes. An authenticated
node waits for its turn (`turnstile`), because opening a session costs far more than these checks.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from aiohttp import hdrs, web

import echo_shared
from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net.client_address import client_ip, place_of
from echo_hub.net.invitations import InviteEndedError
from echo_hub.net.limits import ConnectionLimits
from echo_hub.net.nonces import Nonces
from echo_hub.net.peer_log import PeerLog
from echo_hub.net.penalties import Penalties
from echo_hub.net.turnstile import Turnstile
from echo_shared.errors import CodecError, EchoError, RefusedError, RemoteProtocolError
from echo_shared.signing.identity import Identity, node_id
from echo_shared.wire.codec import decode_from_node, encode
from echo_shared.wire.credentials import REFUSED_TYPE, Credentials, challenge_header
from echo_shared.wire.messages import Hello, Proof, RefusalCode, Refused
from echo_shared.wire.sessions import HubSession

log = logging.getLogger(__name__)

NONCE_BYTES: Final = 32
TURN_S: Final = 10.0
"""Longest wait of an authenticated node for its turn, in seconds; shorter than the node's own timeout."""
MOST_WAITING: Final = 200
"""Maximum number of authenticated nodes in each of the two queues: one for known or invited nodes, one for the
others."""
NO_CREDENTIALS: Final = (
    "This address is for nodes, which authenticate before they connect. A node that gets this answer is older than"
    " the hub: upgrade it by running its installer again.\n"
)
STATUS_OF: Final[Mapping[str, int]] = {
    RefusalCode.PROTOCOL_VERSION: 426,
    RefusalCode.BAD_SIGNATURE: 403,
    RefusalCode.STALE_PROOF: 403,
    RefusalCode.BAD_TOKEN: 403,
    RefusalCode.BANNED: 403,
    RefusalCode.TOO_SOON: 429,
    RefusalCode.PROTOCOL_ERROR: 400,
}
GUESSES: Final = frozenset({RefusalCode.BAD_SIGNATURE, RefusalCode.BAD_TOKEN})
"""Refusals that may be guesses of a token or key. Each one counts as a fault of the client's address (`penalties`)."""
_UPGRADE: Final = {hdrs.UPGRADE: "websocket"}
_NO_STORE: Final = {hdrs.CACHE_CONTROL: "no-store"}


class TurnedAway(Exception):
    """Ends a request that opens no websocket; carries the HTTP response."""

    def __init__(self, response: web.Response) -> None:
        super().__init__(response.status)
        self.response = response


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """An authenticated node that may join. `session` is the state of its connection; the next message to the node is
    Welcome.
    """

    session: HubSession
    invite_id: int | None
    """The personal invite that the node joined with; None if it used none."""


class GuestList(Protocol):
    """Answers questions about a node: its permission to join, its useful work so far, and its invite."""

    async def about(self, node_id: str, token: str | None, nonce: bytes) -> GuestList:
        """Return the guest list to ask about this node. On the hub's own port, the result is this object; at a gateway,
        the result is the hub's answer about the node. `nonce`: nonce with which the node authenticated. Raises
        RefusedError if the hub refuses or does not answer.
        """

    def admit(self, node_id: str) -> None:
        """Raise RefusedError for a node that may not join."""

    def knows(self, node_id: str) -> bool:
        """Return True if this node has done useful work before or was invited. A known node takes precedence over
        unknown nodes."""

    def find_invite(self, node_id: str, token: str | None) -> int | None:
        """Return the id of the invite that admits this node, or None. Raises InviteEndedError for an invite that has
        ended."""


class Door:
    """Authenticates each node before its websocket opens."""

    def __init__(
        self,
        *,
        me: Identity,
        settings: ServerConfig,
        limits: ConnectionLimits,
        penalties: Penalties,
        nonces: Nonces | None = None,
    ) -> None:
        """`nonces`: shared with other gateway processes; None: this process has its own."""
        self.refusals: Counter[str] = Counter()
        """Number of refused requests, by reason."""
        self._log = PeerLog(log)
        self._me = me
        self._settings = settings
        self._limits = limits
        self._penalties = penalties
        self._nonces = nonces or Nonces()
        self._turnstile = Turnstile(rate=settings.joins_per_s, most_waiting=MOST_WAITING)

    async def enter(self, request: web.Request, guests: GuestList) -> Guest:
        """Authenticate the request and return the node that sent it. Raises TurnedAway."""
        if hdrs.ORIGIN in request.headers:  # Sent by a web page in somebody's browser, not by a node.
            self.refusals["web_page"] += 1
            raise TurnedAway(web.Response(status=403, text="Web pages may not connect as nodes.\n"))
        try:
            place = place_of(client_ip(request, self._settings.trusted_proxies))
        except RemoteProtocolError as error:
            raise TurnedAway(self.refuse(error)) from error
        try:
            credentials = Credentials.of_header(request.headers.get(hdrs.AUTHORIZATION, ""))
            if credentials is None:
                self.refusals["no_credentials"] += 1
                raise TurnedAway(web.Response(status=426, text=NO_CREDENTIALS, headers=_UPGRADE))
            hello = decode_from_node(credentials.hello)
            if not isinstance(hello, Hello):
                raise RemoteProtocolError("A node's first message must be Hello.", got=hello.type)
            if not credentials.proof:
                raise TurnedAway(self._challenge(credentials, hello))
            self._penalties.check(place, node_id(hello.node_key), now=self._limits.now())
            session, proof = self._check(credentials, hello)
            guests = await guests.about(session.node_id, proof.invite_token, credentials.nonce)
            invite_id = self._invite(proof, session.node_id, guests)
            guests.admit(session.node_id)
            is_known = invite_id is not None or guests.knows(session.node_id)
            await self._turn(place, known=is_known)
            if request.transport is None or request.transport.is_closing():
                raise TurnedAway(web.Response(status=408))  # The client disconnected while it waited.
            self._limits.vouch(request, session.node_id, is_known=is_known)
            return Guest(session=session, invite_id=invite_id)
        except (RefusedError, RemoteProtocolError) as error:
            is_guess = error.code in GUESSES and not isinstance(error, InviteEndedError)
            if isinstance(error, RemoteProtocolError) or is_guess:
                self._penalties.fault(place, now=self._limits.now())
            raise TurnedAway(self.refuse(error)) from error

    def refuse(self, error: EchoError) -> web.Response:
        """Return the HTTP response that reports this error to a node."""
        said = refused(error)
        self.refusals[said.code] += 1
        # Do not log `got`: it may contain a token.
        extra = {"event": "node_refused", "data": {"code": said.code}}
        self._log.info("refused a node: %s", error.what, extra=extra)
        status = STATUS_OF.get(said.code, 403)
        headers = dict(_NO_STORE)
        if status == 426:
            headers |= _UPGRADE
        elif status == 429:  # After this time, a queue that is full now is empty, if no further node comes.
            headers[hdrs.RETRY_AFTER] = str(math.ceil(MOST_WAITING / self._settings.joins_per_s))
        return web.Response(status=status, body=encode(said), content_type=REFUSED_TYPE, headers=headers)

    async def _turn(self, place: str, *, known: bool) -> None:
        try:
            async with asyncio.timeout(TURN_S):
                await self._turnstile.turn(place, known=known)
        except TimeoutError as error:
            raise self._turnstile.too_many() from error

    def _challenge(self, credentials: Credentials, hello: Hello) -> web.Response:
        session = self._session(self._nonces.make(hello, now=time.time()))
        session.receive(credentials.hello)
        headers = {hdrs.WWW_AUTHENTICATE: challenge_header(session.challenge()), **_NO_STORE}
        return web.Response(status=401, text="Authentication is required.\n", headers=headers)

    def _check(self, credentials: Credentials, hello: Hello) -> tuple[HubSession, Proof]:
        if len(credentials.nonce) != NONCE_BYTES:
            raise CodecError("A nonce has the wrong length.", got=f"{len(credentials.nonce)} bytes")
        now = time.time()
        session = self._session(credentials.nonce)
        session.receive(credentials.hello)
        self._nonces.check(credentials.nonce, hello, now=now)
        proof = session.receive(credentials.proof)
        assert isinstance(proof, Proof)  # The session's state table allows no other message here.
        self._nonces.use(credentials.nonce, now=now)
        return session, proof

    def _session(self, nonce: bytes) -> HubSession:
        return HubSession(me=self._me, software_version=echo_shared.__version__, nonce=nonce)

    def _invite(self, proof: Proof, node_id: str, guests: GuestList) -> int | None:
        """Return the id of the node's invite; None if the node joined without a personal invite. Raises RefusedError if
        an invite is required and missing.

        If joining is open, an ended invite is ignored.
        """
        is_open = self._settings.join == "open"
        given = (proof.invite_token or "").encode()
        if any(hmac.compare_digest(given, token.encode()) for token in self._settings.invite_tokens):
            return None
        try:
            invite_id = guests.find_invite(node_id, proof.invite_token)
        except InviteEndedError:
            if is_open:
                return None
            raise
        if invite_id is None and not is_open:
            raise RefusedError(
                "This hub admits only nodes with an invite token.",
                got="no token" if proof.invite_token is None else "a token that the hub does not know",
                do="Ask the hub's operator for one, then: echo-node join URL --token TOKEN",
                code=RefusalCode.BAD_TOKEN,
            )
        return invite_id


def refused(error: EchoError) -> Refused:
    code = error.code if isinstance(error, RefusedError) else RefusalCode.PROTOCOL_ERROR
    return Refused(code=code, what=error.brief[:2_000], do=(error.do or "")[:2_000])
