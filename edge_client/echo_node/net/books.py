"""Reads a hub's records of this node's work over HTTP, even while the node is not connected.

The node proves its identity as for a websocket (`echo_shared.wire.credentials`), and the hub proves that it holds its
pinned key. All functions block the calling thread.
"""

from __future__ import annotations

import http.client
import secrets
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import echo_shared
from echo_node.host.address import HubAddress
from echo_node.net.tls import handshake_failure
from echo_shared.errors import ConnectError, RefusedError, RemoteProtocolError
from echo_shared.records import contribution
from echo_shared.records.contribution import Contribution
from echo_shared.signing.identity import Identity, node_id
from echo_shared.signing.owner import is_claimed
from echo_shared.wire.codec import decode_from_hub, encode
from echo_shared.wire.credentials import (
    BOOKS_CERTIFICATE,
    BOOKS_FLEET,
    BOOKS_RECEIPTS,
    BOOKS_TEAM,
    MOST_RECEIPTS,
    REFUSED_TYPE,
    Credentials,
    challenge_of,
)
from echo_shared.wire.messages import (
    Challenge,
    Fleet,
    FleetCommand,
    FleetWanted,
    Receipt,
    Receipts,
    ReceiptsWanted,
    Refused,
    Team,
    TeamWanted,
)
from echo_shared.wire.messages.fields import printable_line
from echo_shared.wire.sessions import NodeSession, claim_of

ANSWER_S: Final = 20.0
MOST_BYTES: Final = 2**20


class HubBooks:
    """Queries to one hub about this node's work. Every call raises ConnectError if the hub cannot be reached, and
    RefusedError if it refuses.
    """

    def __init__(self, address: HubAddress, *, me: Identity, hub_key: bytes, invite_token: str | None) -> None:
        """`hub_key`: the pinned key of the hub. Answers signed with another key are rejected."""
        self._address = address
        self._me = me
        self._hub_key = hub_key
        self._invite_token = invite_token
        # No redirects are followed: the credentials are for this hub only.
        proxies: dict[str, str] | None = {} if address.is_loopback else None  # None: use the environment's proxies.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _Unmoved)

    def receipts(self, rollout_ids: Sequence[str]) -> dict[str, Receipt]:
        """Return the hub's receipts by rollout id, for at most `MOST_RECEIPTS` ids. The hub reports an id that is
        unknown or another node's as dropped.
        """
        assert len(rollout_ids) <= MOST_RECEIPTS, "the hub refuses more ids"
        if not rollout_ids:
            return {}
        body = self._ask(BOOKS_RECEIPTS, encode(ReceiptsWanted(rollout_ids=tuple(rollout_ids))))
        answer = decode_from_hub(body)
        if not isinstance(answer, Receipts):
            raise RemoteProtocolError("The hub's answer is not a list of receipts.", got=answer.type)
        found = {receipt.rollout_id: receipt for receipt in answer.receipts}
        if missing := set(rollout_ids) - found.keys():
            raise RemoteProtocolError("The hub's answer lacks some rollouts.", got=", ".join(sorted(missing)[:8]))
        return found

    def team(self, action: Literal["create", "join", "leave", "show"], name: str = "") -> Team:
        """Change or show the node's team. Return the team after the change."""
        answer = decode_from_hub(self._ask(BOOKS_TEAM, encode(TeamWanted(action=action, name=name))))
        if not isinstance(answer, Team):
            raise RemoteProtocolError("The hub's answer is not a team.", got=answer.type)
        return answer

    def fleet(
        self,
        owner: Identity,
        *,
        command: FleetCommand | None = None,
        to: Sequence[str] = (),
        counts_once: bool | None = None,
    ) -> Fleet:
        """Pass the owner's command on to the nodes `to` (empty = all), and return the nodes that have proven to belong
        to the owner.
        """
        wanted = FleetWanted(
            owner=claim_of(owner, self._me.node_id, self._hub_key),
            command=command,
            to=tuple(to),
            counts_once=counts_once,
        )
        answer = decode_from_hub(self._ask(BOOKS_FLEET, encode(wanted)))
        if not isinstance(answer, Fleet):
            raise RemoteProtocolError("The hub's answer is not a fleet.", got=answer.type)
        for node in answer.nodes:
            named = node_id(node.node_key)
            if not is_claimed(owner.public_key, node.claim, node_id=named, hub_key=self._hub_key):
                raise RemoteProtocolError("The hub lists a node that is not the owner's.", got=named)
        return answer

    def certificate(self) -> tuple[bytes, Contribution]:
        """Return the signed certificate and its contents, after checking that they are for this node and the pinned
        key.
        """
        document = self._ask(BOOKS_CERTIFICATE, None)
        said = contribution.verified(document)
        if (said.hub_key, said.node_id) != (self._hub_key.hex(), self._me.node_id):
            got = f"node {said.node_id}, hub key {said.hub_key}"
            raise RemoteProtocolError("The hub sent a certificate of another node or hub.", got=got)
        return document, said

    def _ask(self, path: str, body: bytes | None) -> bytes:
        """Send a request with the proof of this node's identity. Return the body of the hub's answer."""
        session = NodeSession(
            me=self._me,
            pinned_hub_key=self._hub_key,
            software_version=echo_shared.__version__,
            nonce=secrets.token_bytes(32),
        )
        hello = session.hello()
        challenge = self._challenge(
            self._request(path, Credentials(hello=hello), None if body is None else b""), session
        )
        # These values are placeholders, which the hub does not store.
        proof = session.proof(
            name="books", invite_token=self._invite_token, backend="none", device="none", swarm_port=0
        )
        answer = self._request(path, Credentials(hello=hello, nonce=challenge.nonce, proof=proof), body)
        if answer.status != 200:
            raise self._refusal(answer, session)
        return answer.body

    def _challenge(self, answer: _Answer, session: NodeSession) -> Challenge:
        for header in answer.challenges:
            if (frame := challenge_of(header)) is not None:
                message = session.receive(frame)
                if isinstance(message, Challenge):
                    return message
        raise self._refusal(answer, session)

    def _refusal(self, answer: _Answer, session: NodeSession) -> RefusedError | ConnectError:
        if answer.content_type == REFUSED_TYPE:
            message = session.receive(answer.body)
            if isinstance(message, Refused):
                return RefusedError(f"The hub says: {message.what}", do=message.do or None, code=message.code)
        what = "The hub does not answer queries about this node's work."
        got = f"{self._address.origin} answered with HTTP status {answer.status}"
        if answer.status in (404, 405):
            return ConnectError(what, got=got, do="It may be older than this node: ask its operator to upgrade it.")
        return ConnectError(what, got=got, do="Try again later, or ask its operator.")

    def _request(self, path: str, credentials: Credentials, body: bytes | None) -> _Answer:
        headers = {"Authorization": credentials.header(), "Content-Type": REFUSED_TYPE}
        request = urllib.request.Request(self._address.url(path), data=body, headers=headers)
        try:
            try:
                with self._opener.open(request, timeout=ANSWER_S) as response:
                    return _answer(response.status, response.headers, response.read(MOST_BYTES))
            except urllib.error.HTTPError as error:
                with error:
                    return _answer(error.code, error.headers, error.read(MOST_BYTES))
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, ssl.SSLError):
                raise handshake_failure(reason, self._address) from error
            raise ConnectError(
                "The hub cannot be reached.",
                got=f"{self._address.origin}: {printable_line(str(reason) or type(reason).__name__)}",
                do="Check your network, and that the hub runs.",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    status: int
    challenges: tuple[str, ...]
    content_type: str
    body: bytes


def _answer(status: int, headers: Any, body: bytes) -> _Answer:
    return _Answer(
        status=status,
        challenges=tuple(headers.get_all("WWW-Authenticate") or ()),
        content_type=headers.get_content_type(),
        body=body,
    )


class _Unmoved(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None
