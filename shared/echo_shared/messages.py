"""Every message that hub and node exchange, with the bounds each field must keep.

A message is one MessagePack map (`codec`) whose `type` names its class. Unknown fields are ignored (a newer peer may
send more); wrong types, missing fields and values out of bounds are a `CodecError` before anything else reads the
message. Arrays travel as {dtype, shape, data}: raw little-endian bytes, never pickle.

Reading order: the handshake (Hello .. Welcome), then what the hub says, then what the node says.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from echo_shared.fields import (
    MAX_TOKENS,
    Count,
    InfoHash,
    Lax,
    Logprobs,
    Name,
    NodeId,
    Nonce,
    Peer,
    PieceIndex,
    PolicyVersion,
    PublicKey,
    RolloutId,
    Seed,
    Signature,
    Text,
    TokenIds,
    printable_line,
)

PROTOCOL_VERSION: Final = 6
"""What this software speaks. It rises when an old peer could misread a new one."""

OLDEST_PROTOCOL_VERSION: Final = 6
"""The oldest peer version that this software still understands."""

MAX_FRAME_BYTES: Final = 8 * 2**20
MAX_GROUP_SIZE: Final = 1_024
MAX_BATCHED: Final = 4_096
MAX_MESH: Final = 64
"""Nodes of a fleet that are linked with each other; larger fleets are not: links, and what must be said of them, grow
with the square."""
MAX_PIECE_BYTES: Final = 256 * 1024
"""Of a piece that travels in a message; artefacts with larger pieces go through the swarm."""
MAX_PARTS_TOKENS: Final = 65_536
"""Of all parts in one message: half a megabyte, which holds up nothing else on a slow uplink for long."""
MAX_PREFIX_TOKENS: Final = 262_144
"""Of all prefixes of one lease."""
MAX_VERSION_SPANS: Final = 64
"""Of one completion: who has drawn by so many versions draws to the end by the last of them."""


MAX_COST_PER_HOUR: Final = 1_000.0
"""US dollars: more no single machine is worth."""
MAX_POWER_WATTS: Final = 100_000.0


class RefusalCode(StrEnum):
    """Why a hub says no, or ends a connection."""

    PROTOCOL_VERSION = "protocol_version"
    BAD_SIGNATURE = "bad_signature"
    BAD_TOKEN = "bad_token"
    BANNED = "banned"
    ALREADY_CONNECTED = "already_connected"
    PROTOCOL_ERROR = "remote_protocol"
    SHUTTING_DOWN = "shutting_down"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a completion ended: it drew a stop token (kept as its last token), or reached `max_tokens`."""

    STOP = "stop"
    LENGTH = "length"


class ReceiptState(StrEnum):
    """Where a rollout is on its way; TRAINED, EVALUATED and DROPPED are final."""

    LEASED = "leased"
    RECEIVED = "received"
    SCORED = "scored"
    TRAINED = "trained"
    EVALUATED = "evaluated"
    """It has shown how good its version is, on a problem that is never trained on."""
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why a leased rollout was of no use. Every dropped rollout has exactly one."""

    STALE = "stale"
    EXPIRED = "expired"
    DUPLICATE = "duplicate"
    RETURNED = "returned"
    REVOKED = "revoked"
    INVALID = "invalid"
    SCORER_FAILED = "scorer_failed"
    NO_ADVANTAGE = "no_advantage"
    RUN_ENDED = "run_ended"


class StandbyReason(StrEnum):
    """Why a node that asks for work gets none."""

    CHEAPER_NODES_SUFFICE = "cheaper_nodes_suffice"
    SPEND_CAP = "spend_cap"
    """It costs more than the hub may still spend in an hour."""
    TOO_SLOW = "too_slow"
    """At its measured pace, what it returns is too old to be trained on."""
    NO_WORK_NOW = "no_work_now"
    """Others have all that there is."""
    FAILING = "failing"
    """It gave work back, or sent what is not valid, and rests for a while."""


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", allow_inf_nan=False, arbitrary_types_allowed=True
    )


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
    name: Name
    invite_token: Annotated[str, Field(max_length=256)] | None = None
    backend: Name
    device: Annotated[str, Field(max_length=128), AfterValidator(printable_line)]
    swarm_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on which the node's BitTorrent peer listens; 0 = none."""
    mesh_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on which other nodes hand pieces on to this one; 0 = none."""
    cost_per_hour: Annotated[float, Field(ge=0, le=MAX_COST_PER_HOUR)] = 0.0
    """What the hub's operator is to pay for the node while it is active, in US dollars; 0 = it is a gift."""
    power_watts: Annotated[float, Field(ge=0, le=MAX_POWER_WATTS)] = 0.0
    """What it draws while it works; 0 = not stated."""


class Way(StrEnum):
    """How an artefact gets from the hub to a node."""

    INLINE = "inline"
    """The hub sends every piece to every node over the websocket."""
    BROADCAST = "broadcast"
    """The hub sends most pieces to one node each, which hands them on to the others over connections kept open."""
    SWARM = "swarm"
    """BitTorrent: the node asks the hub's peer and other nodes."""
    WEB_SEED = "web_seed"
    """Plain HTTP from the hub."""


class RunKey(Message):
    """One of the run's keys, by which payloads are sealed: see `echo_shared.sealing`."""

    key_id: Count
    key: Annotated[bytes, Field(min_length=32, max_length=32)]


RunKeys = Annotated[tuple[RunKey, ...], Field(max_length=256, strict=False)]


class MeshPeer(Message):
    """Another node to link with, and where it takes pieces from its peers."""

    node_id: NodeId
    host: Annotated[str, Field(max_length=255)]
    port: Annotated[int, Field(ge=0, le=65535)]
    """0 = it cannot be connected to from here; it connects by itself if it can."""


MeshPeers = Annotated[tuple[MeshPeer, ...], Field(max_length=MAX_MESH, strict=False)]


class SharedMemory(Message):
    """Where an artefact lies in the memory of the hub's own host, for a node there: see `echo_shared.shared_memory`."""

    pid: Annotated[int, Field(ge=1, lt=2**31)]
    descriptor: Annotated[int, Field(ge=0, lt=2**31)]
    name: Annotated[str, Field(pattern=r"^echo-[0-9a-f]{32}$")]


class ArtefactOffer(Message):
    """All that a node needs to fetch one artefact (the base model, or one policy version) and to trust it."""

    manifest: Annotated[bytes, Field(max_length=2**20)]
    """`echo_shared.artefacts.Manifest` as signed bytes."""
    signature: Signature
    torrent: Annotated[bytes, Field(max_length=4 * 2**20)]
    web_seed_path: Annotated[str, Field(max_length=512, pattern=r"^/")]
    """Under the node's own passkey; ends in a slash."""
    way: Annotated[Way, Lax] = Way.SWARM
    """How the hub sends it; where that fails the node turns to what is left: the swarm, then the web seed."""
    delta_parent: PolicyVersion | None = None
    """The version that the node must hold to read this one: the manifest's, told beforehand. None = none."""
    peers: Annotated[tuple[Peer, ...], Field(max_length=64, strict=False)] = ()
    shared_memory: SharedMemory | None = None
    """For a node that connects from the hub's own host."""


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


class PolicyPublished(Message):
    """A new version is in the swarm."""

    type: Literal["policy_published"] = "policy_published"
    policy_version: PolicyVersion
    offer: ArtefactOffer


class Peers(Message):
    """More peers for an artefact that the node is fetching or seeding."""

    type: Literal["peers"] = "peers"
    info_hash: Annotated[bytes, Field(min_length=20, max_length=20)]
    peers: Annotated[tuple[Peer, ...], Field(max_length=64, strict=False)]


class KeysRotated(Message):
    """The run's keys from now on; those that are not among them are of no use any more."""

    type: Literal["keys_rotated"] = "keys_rotated"
    run_keys: RunKeys


class Mesh(Message):
    """The nodes to link with, all of them and no others; replaces what was said before."""

    type: Literal["mesh"] = "mesh"
    peers: MeshPeers


class Piece(Message):
    """One piece of an artefact, from the hub or from a node that hands it on; it counts once it matches its hash."""

    type: Literal["piece"] = "piece"
    info_hash: InfoHash
    index: PieceIndex
    data: Annotated[bytes, Field(min_length=1, max_length=MAX_PIECE_BYTES)]
    hand_on: bool = False
    """The node is to send it to all nodes that it is linked with. Only the hub says so."""


class Unwanted(Message):
    """Nobody fetches these artefacts any more: they need not be served."""

    type: Literal["unwanted"] = "unwanted"
    info_hashes: Annotated[tuple[InfoHash, ...], Field(max_length=256, strict=False)]


class VersionSpan(Message):
    """Tokens of one completion that one version drew, one after the other."""

    policy_version: PolicyVersion
    num_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]


VersionSpans = Annotated[tuple[VersionSpan, ...], Field(max_length=MAX_VERSION_SPANS, strict=False)]


class LeasedPrefix(Message):
    """The beginning of one rollout of a lease, which another node has drawn: it goes on with draw number len(ids)."""

    index: Count
    ids: TokenIds
    logprobs: Logprobs
    """Nats, as that node gave them, one a token."""
    versions: VersionSpans = ()
    """Which versions drew it, in order, one after the other; empty = the lease's alone."""


def _prefixes_in_bounds(prefixes: tuple[LeasedPrefix, ...]) -> tuple[LeasedPrefix, ...]:
    for prefix in prefixes:
        if prefix.versions and sum(span.num_tokens for span in prefix.versions) != len(prefix.ids):
            raise ValueError("the versions of a prefix must be of as many tokens as it has")
    if sum(len(prefix.ids) for prefix in prefixes) > MAX_PREFIX_TOKENS:
        raise ValueError(f"prefixes may have {MAX_PREFIX_TOKENS} tokens in all")
    return prefixes


class Lease(Message):
    """Work for one node until a deadline: the rollouts `indices` of one group, drawn with `seed`."""

    type: Literal["lease"] = "lease"
    lease_id: Count
    group_id: Count
    indices: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_GROUP_SIZE, strict=False)]
    prompt_ids: TokenIds
    seed: Seed
    policy_version: PolicyVersion
    """What draws it; with `on_new_version` = "interrupt", the oldest that may."""
    temperature: Annotated[float, Field(gt=0, le=10)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Of a completion, its prefix included."""
    stop_ids: Annotated[tuple[Count, ...], Field(max_length=64, strict=False)]
    deadline_s: Annotated[float, Field(gt=0)]
    """Seconds from sending until the hub leases the work elsewhere."""
    offer: ArtefactOffer | None = None
    """Of the version, where it need not be the newest: an evaluation's lease."""
    prefixes: Annotated[
        tuple[LeasedPrefix, ...], Field(max_length=MAX_GROUP_SIZE, strict=False), AfterValidator(_prefixes_in_bounds)
    ] = ()
    """At most one an index; a rollout without one begins at its first token."""
    on_new_version: Literal["finish", "interrupt"] = "finish"
    """When the node comes to hold a newer version: it draws the lease to its end by the one that it names, or goes on
    in mid-completion by the newer one."""


class LeaseRevoked(Message):
    """The hub no longer wants what is unfinished of this lease."""

    type: Literal["lease_revoked"] = "lease_revoked"
    lease_id: Count
    reason: Annotated[DropReason, Lax]


class Standby(Message):
    """Why the node gets no work; it stays connected and is sent versions, so that it can begin at once."""

    type: Literal["standby"] = "standby"
    reason: Annotated[StandbyReason, Lax] | None
    """None: it is not kept from work any more."""
    detail: Text = ""
    """A sentence with figures, for its user."""


class Receipt(Message):
    """One rollout's state on the hub, as committed in its store."""

    rollout_id: RolloutId
    state: Annotated[ReceiptState, Lax]
    drop_reason: Annotated[DropReason, Lax] | None = None


class Receipts(Message):
    """States that the hub has committed. The first for a rollout is its ack: the node may forget the payload."""

    type: Literal["receipts"] = "receipts"
    receipts: Annotated[tuple[Receipt, ...], Field(max_length=MAX_BATCHED, strict=False)]


class NodeStatus(Message):
    """What the node is doing and how much work it will hold at once. Sent on change, and as the heartbeat."""

    type: Literal["node_status"] = "node_status"
    activity: Literal["preparing", "waiting", "fetching", "sampling", "draining"]
    capacity: Annotated[int, Field(ge=0, le=MAX_BATCHED)]
    """Rollouts that the node is willing to hold, finished ones not counted; 0 = lease me nothing."""
    policy_version: PolicyVersion | None
    """Newest version that is verified and ready to sample from; None while the base is not there yet."""
    tokens_per_s: Annotated[float, Field(ge=0)]


class Fetched(Message):
    """An artefact arrived, and its hash and signature are right."""

    type: Literal["fetched"] = "fetched"
    info_hash: Annotated[bytes, Field(min_length=20, max_length=20)]
    policy_version: PolicyVersion | None
    """None for the base model."""
    seconds: Annotated[float, Field(ge=0)]
    swarm_bytes: Count
    web_seed_bytes: Count
    shared_memory_bytes: Count = 0
    pushed_bytes: Count = 0
    """From the hub's hand."""
    mesh_bytes: Count = 0
    """Handed on by other nodes."""
    model_hub_bytes: Count = 0
    """From a model hub."""


class Have(Message):
    """Pieces that have arrived and match their hash, from the hub or from other nodes."""

    type: Literal["have"] = "have"
    info_hash: InfoHash
    pieces: Annotated[tuple[PieceIndex, ...], Field(max_length=MAX_BATCHED, strict=False)]
    wanted: bool = True
    """False: the node does not want the rest of them from the hub's hand; it has all, or has turned elsewhere."""


class Links(Message):
    """The nodes that this one is connected with and can hand pieces on to, all of them."""

    type: Literal["links"] = "links"
    node_ids: Annotated[tuple[NodeId, ...], Field(max_length=MAX_MESH, strict=False)]


class KeyframeWanted(Message):
    """The node cannot read the delta it was offered: it lacks its parent, or what came out does not match its hash."""

    type: Literal["keyframe_wanted"] = "keyframe_wanted"
    policy_version: PolicyVersion


class Rollout(Message):
    """One finished completion: its tokens, the log-probabilities it was drawn with, and the versions that drew it."""

    type: Literal["rollout"] = "rollout"
    rollout_id: RolloutId
    lease_id: Count
    group_id: Count
    index: Count
    policy_version_start: PolicyVersion
    """Of its first token."""
    policy_version_end: PolicyVersion
    """Of its last token."""
    completion_ids: TokenIds
    behavior_logprobs: Logprobs
    """Nats, under the softmax at the lease's temperature, one a completion token."""
    finish_reason: Annotated[FinishReason, Lax]
    sampling_s: Annotated[float, Field(ge=0)]
    num_given: Count = 0
    """Tokens at its beginning that the lease gave as a prefix: the others are this node's."""
    versions: VersionSpans = ()
    """Which versions drew it, in order, one after the other; empty = one drew it all."""


class RolloutPart(Message):
    """What is new of one unfinished completion: its tokens from number `start` on, all drawn by one version."""

    lease_id: Count
    index: Count
    start: Annotated[int, Field(ge=0, lt=MAX_TOKENS)]
    """0 again after a reconnect: the completion anew, a leased prefix included."""
    policy_version: PolicyVersion
    ids: TokenIds
    logprobs: Logprobs
    """Nats, one a token."""


def _parts_in_bounds(parts: tuple[RolloutPart, ...]) -> tuple[RolloutPart, ...]:
    if sum(len(part.ids) for part in parts) > MAX_PARTS_TOKENS:
        raise ValueError(f"parts may have {MAX_PARTS_TOKENS} tokens in all")
    return parts


class RolloutParts(Message):
    """What the node has drawn of rollouts that it goes on with. Never spooled: what is lost on the way is drawn again,
    or sent again after a reconnect."""

    type: Literal["rollout_parts"] = "rollout_parts"
    parts: Annotated[
        tuple[RolloutPart, ...],
        Field(min_length=1, max_length=MAX_GROUP_SIZE, strict=False),
        AfterValidator(_parts_in_bounds),
    ]


class LeaseReturned(Message):
    """The node will not finish these rollouts. What it has drawn of them has been sent before."""

    type: Literal["lease_returned"] = "lease_returned"
    lease_id: Count
    indices: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_GROUP_SIZE, strict=False)]
    reason: Text


class ReceiptsWanted(Message):
    """The node knows no final state of these rollouts, which the hub has: receipts sent while it was away are lost."""

    type: Literal["receipts_wanted"] = "receipts_wanted"
    rollout_ids: Annotated[tuple[RolloutId, ...], Field(min_length=1, max_length=MAX_BATCHED, strict=False)]


class Goodbye(Message):
    """The node leaves on purpose; what it holds has been returned."""

    type: Literal["goodbye"] = "goodbye"
    reason: Text = ""


FromHub = (
    Challenge
    | Welcome
    | Refused
    | PolicyPublished
    | Peers
    | KeysRotated
    | Mesh
    | Piece
    | Unwanted
    | Lease
    | LeaseRevoked
    | Standby
    | Receipts
)
FromNode = (
    Hello
    | Proof
    | NodeStatus
    | Fetched
    | Have
    | Links
    | KeyframeWanted
    | Rollout
    | RolloutParts
    | LeaseReturned
    | ReceiptsWanted
    | Goodbye
)


def rollout_id(lease_id: int, index: int) -> str:
    """The name of one leased rollout; the same on node, hub and leaderboard."""
    return f"{lease_id}-{index}"
