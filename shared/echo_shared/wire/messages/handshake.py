"""Handshake between node and hub, from Hello to Welcome, and the messages that end a connection."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from echo_shared.wire.messages.base import WireMessage
from echo_shared.wire.messages.engines import known_backend
from echo_shared.wire.messages.fields import (
    Count,
    Name,
    Nonce,
    PolicyVersion,
    PublicKey,
    Signature,
    Text,
    printable_line,
)
from echo_shared.wire.messages.fleet import OwnerClaim
from echo_shared.wire.messages.shown_names import checked_name
from echo_shared.wire.messages.spread import ArtefactOffer, MeshPeers, RunKeys

MAX_COST_PER_HOUR: Final = 1_000.0
"""Maximum price of a node in US dollars per hour. No single machine costs more."""
MAX_POWER_WATTS: Final = 100_000.0


class RefusalCode(StrEnum):
    """Reason why the hub refuses or ends a connection."""

    PROTOCOL_VERSION = "protocol_version"
    BAD_SIGNATURE = "bad_signature"
    STALE_PROOF = "stale_proof"
    """The proof answers a challenge that has expired or was used before."""
    TOO_SOON = "too_soon"
    """The hub has no free slot, or the node broke the protocol and must wait before it reconnects."""
    BAD_TOKEN = "bad_token"
    BANNED = "banned"
    ALREADY_CONNECTED = "already_connected"
    PROTOCOL_ERROR = "remote_protocol"
    SHUTTING_DOWN = "shutting_down"
    FINISHED = "finished"
    NAME_TAKEN = "name_taken"
    """The name looks like the name of another node that had it first."""


MAX_REFUSED_TENANTS: Final = 64
"""Maximum number of tenants that one node refuses by name."""


class Hello(WireMessage):
    """First message of a node. Its first three fields keep their meaning in all protocol versions."""

    type: Literal["hello"] = "hello"
    protocol_version: Count
    software_version: Name
    node_key: PublicKey
    nonce: Nonce


class Challenge(WireMessage):
    """The hub's answer to Hello. `signature`, made with `hub_key` over the node's nonce, proves the hub's identity."""

    type: Literal["challenge"] = "challenge"
    protocol_version: Count
    software_version: Name
    hub_key: PublicKey
    nonce: Nonce
    signature: Signature


class Proof(WireMessage):
    """The node's signature over the hub's nonce, and the node's description. The node sends it after it has pinned the
    hub's key.
    """

    type: Literal["proof"] = "proof"
    signature: Signature
    name: Annotated[str, Field(min_length=1, max_length=64), AfterValidator(checked_name)]
    invite_token: Annotated[str, Field(max_length=256)] | None = None
    backend: Annotated[str, Field(max_length=64), AfterValidator(known_backend)]
    device: Annotated[str, Field(max_length=128), AfterValidator(printable_line)]
    swarm_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on which the node's BitTorrent peer listens; 0 = none."""
    mesh_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on which the node receives pieces from other nodes; 0 = none."""
    cost_per_hour: Annotated[float, Field(ge=0, le=MAX_COST_PER_HOUR)] = 0.0
    """Price that the hub's operator pays for an active node, in US dollars per hour; 0 = donated."""
    power_watts: Annotated[float, Field(ge=0, le=MAX_POWER_WATTS)] = 0.0
    """Power draw under load, in watts; 0 = not stated."""
    hears_totals: bool = False
    """True: the node understands the message Totals."""
    knows_answered: bool = False
    """True: the node understands the receipt state ANSWERED."""
    knows_session_lost: bool = False
    """True: the node understands the drop reason SESSION_LOST."""
    answers: bool = True
    """False: the node works for no tenant of the hub, only for the run's own training and evaluations."""
    refuses: Annotated[tuple[Name, ...], Field(max_length=MAX_REFUSED_TENANTS, strict=False)] = ()
    """Names of tenants, as leases show them, for which the node does not work."""
    owner: OwnerClaim | None = None
    """The owner's signature that this node is the owner's; None = the node belongs to no owner. A node with an owner
    understands FleetCommand.
    """
    punches: bool = False
    """True: the node understands the message Meet, and links through routers."""


class Welcome(WireMessage):
    """The hub accepts the node. `policy` is None as long as the newest published version is 0, the base model."""

    type: Literal["welcome"] = "welcome"
    run_id: Name
    run_name: Name
    node_id: Name
    base: ArtefactOffer
    gguf: ArtefactOffer | None = None
    """The base model as a GGUF file, which a node that runs llama.cpp fetches in place of `base`; None = the hub offers
    no such file."""
    policy: ArtefactOffer | None
    policy_version: PolicyVersion
    tracker_path: Annotated[str, Field(max_length=512, pattern=r"^/")]
    heartbeat_s: Annotated[float, Field(gt=0, le=600)]
    run_keys: RunKeys
    """Keys that decrypt all published artefacts."""
    mesh: MeshPeers = ()
    """Nodes to which this node should connect, to pass on pieces of new versions."""
    sighting_path: Annotated[str, Field(max_length=512, pattern=r"^(/.*)?$")] = ""
    """Path at which the hub tells the node its public address; empty = the hub does not help nodes to link through
    routers."""


class Refused(WireMessage):
    """The hub ends the connection, at any moment, and gives the reason. `do` tells the user what to change."""

    type: Literal["refused"] = "refused"
    code: Name
    what: Text
    do: Text = ""


class Goodbye(WireMessage):
    """The node leaves on purpose, after it has returned its leases."""

    type: Literal["goodbye"] = "goodbye"
    reason: Text = ""
