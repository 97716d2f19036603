"""How node and hub meet, from the node's hello to the hub's welcome, and how they part."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from echo_shared.messages.base import Message
from echo_shared.messages.engines import known_backend
from echo_shared.messages.fields import Count, Name, Nonce, PolicyVersion, PublicKey, Signature, Text, printable_line
from echo_shared.messages.shown_names import checked_name
from echo_shared.messages.spread import ArtefactOffer, MeshPeers, RunKeys

MAX_COST_PER_HOUR: Final = 1_000.0
"""US dollars: more no single machine is worth."""
MAX_POWER_WATTS: Final = 100_000.0


class RefusalCode(StrEnum):
    """Why a hub says no, or ends a connection."""

    PROTOCOL_VERSION = "protocol_version"
    BAD_SIGNATURE = "bad_signature"
    STALE_PROOF = "stale_proof"
    """It answers a challenge that has ended, or that was answered before."""
    TOO_SOON = "too_soon"
    """The hub has no room now, or this node broke the protocol and waits before it may come back."""
    BAD_TOKEN = "bad_token"
    BANNED = "banned"
    ALREADY_CONNECTED = "already_connected"
    PROTOCOL_ERROR = "remote_protocol"
    SHUTTING_DOWN = "shutting_down"
    FINISHED = "finished"
    NAME_TAKEN = "name_taken"
    """The node's name looks like that of another one, which had it first."""


class Hello(Message):
    """Node's first word. Its first three fields keep their meaning in every protocol version."""

    type: Literal["hello"] = "hello"
    protocol_version: Count
    software_version: Name
    node_key: PublicKey
    nonce: Nonce


class Challenge(Message):
    """Hub's answer: `signature` by `hub_key` over the node's nonce proves who the hub is."""

    type: Literal["challenge"] = "challenge"
    protocol_version: Count
    software_version: Name
    hub_key: PublicKey
    nonce: Nonce
    signature: Signature


class Proof(Message):
    """Node's signature over the hub's nonce, and what it says of itself; sent once the hub's key is pinned."""

    type: Literal["proof"] = "proof"
    signature: Signature
    name: Annotated[str, Field(min_length=1, max_length=64), AfterValidator(checked_name)]
    invite_token: Annotated[str, Field(max_length=256)] | None = None
    backend: Annotated[str, Field(max_length=64), AfterValidator(known_backend)]
    device: Annotated[str, Field(max_length=128), AfterValidator(printable_line)]
    swarm_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on which the node's BitTorrent peer listens; 0 = none."""
    mesh_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on which other nodes hand pieces on to this one; 0 = none."""
    cost_per_hour: Annotated[float, Field(ge=0, le=MAX_COST_PER_HOUR)] = 0.0
    """What the hub's operator is to pay for the node while it is active, in US dollars; 0 = it is a gift."""
    power_watts: Annotated[float, Field(ge=0, le=MAX_POWER_WATTS)] = 0.0
    """What it draws while it works; 0 = not stated."""
    hears_totals: bool = False
    """It understands Totals."""


class Welcome(Message):
    """The node is in. `policy` is None while the newest published version is 0 (the base itself)."""

    type: Literal["welcome"] = "welcome"
    run_id: Name
    run_name: Name
    node_id: Name
    base: ArtefactOffer
    policy: ArtefactOffer | None
    policy_version: PolicyVersion
    tracker_path: Annotated[str, Field(max_length=512, pattern=r"^/")]
    heartbeat_s: Annotated[float, Field(gt=0, le=600)]
    run_keys: RunKeys
    """Those of everything that is published."""
    mesh: MeshPeers = ()
    """Nodes to link with."""


class Refused(Message):
    """Hub ends the connection and says why, at any moment; `do` is the user's way out."""

    type: Literal["refused"] = "refused"
    code: Name
    what: Text
    do: Text = ""


class Goodbye(Message):
    """The node leaves on purpose; what it holds has been returned."""

    type: Literal["goodbye"] = "goodbye"
    reason: Text = ""
