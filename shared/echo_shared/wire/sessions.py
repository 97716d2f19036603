"""Both ends of one connection as state machines without I/O: frames in, messages out.

    node                                   hub
    Hello(nonce_n)            ──►          checks the protocol version
              ◄──  Challenge(hub_key, nonce_h, signature over nonce_n)
    checks version, signature and pin
    Proof(signature over nonce_h, token)──► checks the signature; the caller checks the token
              ◄──  Welcome                 open: every other message, both ways

    At any moment: ◄── Refused (hub ends it), Goodbye ──► (node ends it).

Everything before Welcome travels in HTTP headers (`credentials`), before any websocket exists. Hello comes with the
first request, and again with the Proof. The hub creates a session for each request and keeps no state in between: the
second session gets the nonce that the node returns. The caller must check that nonce's age and origin.

A frame that does not decode, or that is not allowed in the session's state, raises RemoteProtocolError; the caller then
ends this connection only. Sessions send nothing themselves: `send` and the handshake calls return frames to send.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from echo_shared.errors import LocalProtocolError, RefusedError, RemoteProtocolError
from echo_shared.signing import identity
from echo_shared.signing.identity import Identity
from echo_shared.signing.owner import claim, is_claimed
from echo_shared.wire.codec import decode_from_hub, decode_from_node, encode
from echo_shared.wire.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Challenge,
    CheckLease,
    CheckResult,
    Fetched,
    FleetCommand,
    FleetReport,
    FromHub,
    FromNode,
    Goodbye,
    Have,
    Hello,
    KeyframeWanted,
    KeysRotated,
    Lease,
    LeaseReturned,
    LeaseRevoked,
    Links,
    Meet,
    MeetWanted,
    Mesh,
    NodeStatus,
    OwnerClaim,
    Peers,
    Piece,
    PolicyPublished,
    Proof,
    Receipts,
    ReceiptsWanted,
    RefusalCode,
    Refused,
    Rollout,
    RolloutParts,
    Standby,
    Totals,
    Unwanted,
    Welcome,
)

UPGRADE_NODE: Final = "Upgrade the node: run its installer again."
"""The hub's advice to an outdated node. The node shows advice that fits its own installation instead."""
SUPPORTED_VERSIONS: Final = range(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION + 1)


class SessionState(Enum):
    START = "start"
    CHALLENGED = "challenged"
    PROVEN = "proven"
    OPEN = "open"
    CLOSED = "closed"


NODE_MAY_RECEIVE: Final[dict[SessionState, dict[type, SessionState]]] = {
    SessionState.START: {},
    SessionState.CHALLENGED: {Challenge: SessionState.PROVEN, Refused: SessionState.CLOSED},
    SessionState.PROVEN: {Welcome: SessionState.OPEN, Refused: SessionState.CLOSED},
    SessionState.OPEN: {
        **dict.fromkeys(
            (
                PolicyPublished,
                Peers,
                KeysRotated,
                Mesh,
                Meet,
                Piece,
                Unwanted,
                Lease,
                LeaseRevoked,
                CheckLease,
                Standby,
                Receipts,
                Totals,
                FleetCommand,
            ),
            SessionState.OPEN,
        ),
        Refused: SessionState.CLOSED,
    },
    SessionState.CLOSED: {},
}
"""Messages that the node may receive in each state, with the next state. CHALLENGED = Hello sent, PROVEN =
Proof sent.
"""

HUB_MAY_RECEIVE: Final[dict[SessionState, dict[type, SessionState]]] = {
    SessionState.START: {Hello: SessionState.CHALLENGED},
    SessionState.CHALLENGED: {Proof: SessionState.PROVEN},
    SessionState.PROVEN: {},
    SessionState.OPEN: {
        **dict.fromkeys(
            (
                NodeStatus,
                Fetched,
                Have,
                Links,
                MeetWanted,
                KeyframeWanted,
                Rollout,
                RolloutParts,
                LeaseReturned,
                CheckResult,
                ReceiptsWanted,
                FleetReport,
            ),
            SessionState.OPEN,
        ),
        Goodbye: SessionState.CLOSED,
    },
    SessionState.CLOSED: {},
}
"""Messages that the hub may receive in each state, with the next state. CHALLENGED = Challenge sent, PROVEN = signature
verified, waiting for the caller's decision.
"""


def _transcript(role: str, *, node_nonce: bytes, hub_nonce: bytes, node_key: bytes, hub_key: bytes) -> bytes:
    """Return the bytes that a handshake signature covers. Role, keys and nonces of both ends prevent replays."""
    return b"echo-swarm handshake 1\0" + role.encode() + b"\0" + node_nonce + hub_nonce + node_key + hub_key


def claim_of(owner: Identity, node_id: str, hub_key: bytes) -> OwnerClaim:
    """Return the proof for one hub that a node belongs to `owner`."""
    return OwnerClaim(owner_key=owner.public_key, signature=claim(owner, node_id=node_id, hub_key=hub_key))


def check_claim(said: OwnerClaim, *, node_id: str, hub_key: bytes) -> None:
    """Raise RefusedError unless the owner has signed that this node is the owner's."""
    if not is_claimed(said.owner_key, said.signature, node_id=node_id, hub_key=hub_key):
        raise RefusedError(
            "The node could not prove that it belongs to its owner.",
            do="Give the node the owner's code again: echo-node fleet join",
            code=RefusalCode.BAD_SIGNATURE,
        )


def _version_refusal(*, mine: str, theirs: str, peer: Hello | Challenge) -> RefusedError:
    """Return the refusal of different protocol versions. Its advice is for the side with the older version."""
    behind = theirs if peer.protocol_version < OLDEST_PROTOCOL_VERSION else mine
    upgrade = {"node": UPGRADE_NODE, "hub": "Ask the hub's operator to upgrade it."}
    return RefusedError(
        "Hub and node speak different protocol versions.",
        got=f"{theirs} {peer.protocol_version} (echo-swarm {peer.software_version}), {mine} {PROTOCOL_VERSION}",
        do=upgrade[behind],
        code=RefusalCode.PROTOCOL_VERSION,
    )


def _in_state(message: FromHub | FromNode, state: SessionState) -> str:
    return f"{message.type} in state {state.value}"


class NodeSession:
    """The node's end. On first use, `pinned_hub_key` is None: any hub is accepted, and the caller must pin its key."""

    def __init__(self, *, me: Identity, pinned_hub_key: bytes | None, software_version: str, nonce: bytes) -> None:
        self.state = SessionState.START
        self.hub_key: bytes | None = None
        self._me = me
        self._pinned_hub_key = pinned_hub_key
        self._software_version = software_version
        self._nonce = nonce
        self._challenge: Challenge | None = None

    def hello(self) -> bytes:
        if self.state is not SessionState.START:
            raise LocalProtocolError("Hello is the first message.", got=self.state.value)
        self.state = SessionState.CHALLENGED
        return encode(
            Hello(
                protocol_version=PROTOCOL_VERSION,
                software_version=self._software_version,
                node_key=self._me.public_key,
                nonce=self._nonce,
            )
        )

    def receive(self, frame: bytes) -> FromHub:
        """Decode `frame` and check that the state allows it. After a Challenge is returned, the hub has
        proven its key.
        """
        message = decode_from_hub(frame)
        next_state = NODE_MAY_RECEIVE[self.state].get(type(message))
        if next_state is None:
            raise RemoteProtocolError("The hub sent a message out of turn.", got=_in_state(message, self.state))
        if isinstance(message, Challenge):
            self._check(message)
        self.state = next_state
        return message

    def _check(self, challenge: Challenge) -> None:
        if challenge.protocol_version not in SUPPORTED_VERSIONS:
            raise _version_refusal(mine="node", theirs="hub", peer=challenge)
        if not identity.verify(challenge.hub_key, challenge.signature, self._signed("hub", challenge)):
            raise RemoteProtocolError("The hub could not prove that it holds its key.", got="a wrong signature")
        if self._pinned_hub_key is not None and challenge.hub_key != self._pinned_hub_key:
            raise RefusedError(
                "The hub's key differs from the one that this node has stored. Another server may be impersonating it.",
                got=f"{identity.fingerprint(challenge.hub_key)}; stored: {identity.fingerprint(self._pinned_hub_key)}",
                do="Ask the operator for the new key's fingerprint. If it is right: echo-node join URL --trust-new-key",
                code="hub_key_changed",
            )
        self.hub_key = challenge.hub_key
        self._challenge = challenge

    def _signed(self, role: str, challenge: Challenge) -> bytes:
        return _transcript(
            role,
            node_nonce=self._nonce,
            hub_nonce=challenge.nonce,
            node_key=self._me.public_key,
            hub_key=challenge.hub_key,
        )

    def proof(
        self,
        *,
        name: str,
        invite_token: str | None,
        backend: str,
        device: str,
        swarm_port: int,
        mesh_port: int = 0,
        cost_per_hour: float = 0.0,
        power_watts: float = 0.0,
        owner: Identity | None = None,
        punches: bool = False,
        answers: bool = True,
        refuses: tuple[str, ...] = (),
    ) -> bytes:
        """Return the frame to send after the Challenge. The caller must have pinned `hub_key` first.

        `owner`: key of the node's owner; None = the node belongs to no fleet.
        """
        if self.state is not SessionState.PROVEN or self._challenge is None:
            raise LocalProtocolError("Proof answers a Challenge.", got=self.state.value)
        return encode(
            Proof(
                signature=self._me.sign(self._signed("node", self._challenge)),
                name=name,
                invite_token=invite_token,
                backend=backend,
                device=device,
                swarm_port=swarm_port,
                mesh_port=mesh_port,
                cost_per_hour=cost_per_hour,
                power_watts=power_watts,
                hears_totals=True,
                knows_answered=True,
                knows_session_lost=True,
                answers=answers,
                refuses=refuses,
                owner=None if owner is None else claim_of(owner, self._me.node_id, self._challenge.hub_key),
                punches=punches,
            )
        )

    def send(self, message: FromNode) -> bytes:
        """Encode a message. Raises LocalProtocolError unless the session is open and a node may send this message."""
        if self.state is not SessionState.OPEN or type(message) not in HUB_MAY_RECEIVE[SessionState.OPEN]:
            raise LocalProtocolError("This message may not be sent now.", got=_in_state(message, self.state))
        if isinstance(message, Goodbye):
            self.state = SessionState.CLOSED
        return encode(message)


class HubSession:
    """The hub's end. Receiving sets `hello`, then `proof`; the caller then calls `welcome` or `refuse`."""

    def __init__(self, *, me: Identity, software_version: str, nonce: bytes) -> None:
        self.state = SessionState.START
        self.hello: Hello | None = None
        self.proof: Proof | None = None
        self._me = me
        self._software_version = software_version
        self._nonce = nonce

    @property
    def is_closed(self) -> bool:
        return self.state is SessionState.CLOSED

    @property
    def node_id(self) -> str:
        """The node's id. It is verified once `proof` is set, that is, once the node has proved its key."""
        if self.hello is None:
            raise LocalProtocolError("The node has not sent its key yet.", got=self.state.value)
        return identity.node_id(self.hello.node_key)

    def receive(self, frame: bytes) -> FromNode:
        """Decode `frame`. Raises RefusedError for a wrong protocol version or signature; send it with `refuse`."""
        message = decode_from_node(frame)
        next_state = HUB_MAY_RECEIVE[self.state].get(type(message))
        if next_state is None:
            raise RemoteProtocolError("The node sent a message out of turn.", got=_in_state(message, self.state))
        if isinstance(message, Hello):
            if message.protocol_version not in SUPPORTED_VERSIONS:
                raise _version_refusal(mine="hub", theirs="node", peer=message)
            self.hello = message
        elif isinstance(message, Proof):
            assert self.hello is not None
            if not identity.verify(self.hello.node_key, message.signature, self._signed("node", self.hello)):
                raise RefusedError(
                    "The node could not prove that it holds its key.",
                    do="Restart the node; if that does not help, create a new identity for it.",
                    code=RefusalCode.BAD_SIGNATURE,
                )
            if message.owner is not None:
                check_claim(message.owner, node_id=self.node_id, hub_key=self._me.public_key)
            self.proof = message
        self.state = next_state
        return message

    def _signed(self, role: str, hello: Hello) -> bytes:
        return _transcript(
            role,
            node_nonce=hello.nonce,
            hub_nonce=self._nonce,
            node_key=hello.node_key,
            hub_key=self._me.public_key,
        )

    def challenge(self) -> bytes:
        if self.state is not SessionState.CHALLENGED or self.hello is None:
            raise LocalProtocolError("Challenge answers a Hello.", got=self.state.value)
        return encode(
            Challenge(
                protocol_version=PROTOCOL_VERSION,
                software_version=self._software_version,
                hub_key=self._me.public_key,
                nonce=self._nonce,
                signature=self._me.sign(self._signed("hub", self.hello)),
            )
        )

    def welcome(self, message: Welcome) -> bytes:
        """Return the frame that admits the node, to send after its Proof."""
        if self.state is not SessionState.PROVEN:
            raise LocalProtocolError("Welcome answers a Proof.", got=self.state.value)
        self.state = SessionState.OPEN
        return encode(message)

    def refuse(self, code: str, what: str, do: str = "") -> bytes:
        """Return the last frame of this connection. Allowed in any state."""
        self.state = SessionState.CLOSED
        return encode(Refused(code=code, what=what, do=do))

    def send(self, message: FromHub) -> bytes:
        """Encode a message. Raises LocalProtocolError unless the session is open and a hub may send this message."""
        if self.state is not SessionState.OPEN or type(message) not in NODE_MAY_RECEIVE[SessionState.OPEN]:
            raise LocalProtocolError("This message may not be sent now.", got=_in_state(message, self.state))
        return encode(message)
