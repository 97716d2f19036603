"""Distribution of the base model and the policy versions: offers, keys, peers, pieces, and acknowledgements."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from echo_shared.wire.messages.base import MAX_BATCHED, WireMessage
from echo_shared.wire.messages.fields import Count, InfoHash, Lax, NodeId, Peer, PieceIndex, PolicyVersion, Signature

MAX_MESH: Final = 32
"""Maximum connections of a node to other nodes. A larger fleet connects at random."""
MAX_HAND_ON_BYTES: Final = 48 * 1024
"""Maximum size of a piece's forwarding route: enough for 16,384 nodes."""
MAX_PIECE_BYTES: Final = 256 * 1024
"""Maximum size of a piece in a message. Artefacts with larger pieces go through BitTorrent."""
MAX_ADDRESSES: Final = 4
"""Maximum addresses of one node at which another one tries to connect."""
FIRST_UNPRIVILEGED_PORT: Final = 1_024


class Way(StrEnum):
    """Transport of an artefact from the hub to a node."""

    INLINE = "inline"
    """The hub sends every piece to every node over the websocket."""
    BROADCAST = "broadcast"
    """The hub sends most pieces to one node each, which forwards them to other nodes over open connections."""
    SWARM = "swarm"
    """BitTorrent, with the hub and other nodes as peers."""
    WEB_SEED = "web_seed"
    """Plain HTTP from the hub."""


Host = Annotated[str, Field(max_length=64)]
Sighting = Annotated[str, Field(max_length=200)]
"""The hub's signed statement about a node's address, see `echo_hub.net.sightings`. Opaque to nodes."""
PeerAddress = Annotated[tuple[Host, Annotated[int, Field(ge=FIRST_UNPRIVILEGED_PORT, le=65535)]], Lax]
"""Address at which a peer expects a connection. Never a port of the system's own services."""


class RunKey(WireMessage):
    """One of the run's keys that encrypt artefacts, see `echo_shared.artefacts.sealing`."""

    key_id: Count
    key: Annotated[bytes, Field(min_length=32, max_length=32)]


RunKeys = Annotated[tuple[RunKey, ...], Field(max_length=256, strict=False)]


class MeshPeer(WireMessage):
    """A node to connect to, with its address for incoming pieces."""

    node_id: NodeId
    host: Annotated[str, Field(max_length=255)]
    port: Annotated[int, Field(ge=0, le=65535)]
    """TCP port of the peer. 0 = the peer accepts no connections; it connects to this node if it can."""
    number: Annotated[int, Field(ge=0, le=65_535)]
    """Number that stands for the peer in `Piece.hand_on`."""


MeshPeers = Annotated[tuple[MeshPeer, ...], Field(max_length=MAX_MESH, strict=False)]


class SharedMemory(WireMessage):
    """Place of an artefact in the hub's memory, for a node on the same host, see `echo_shared.swarm.shared_memory`."""

    pid: Annotated[int, Field(ge=1, lt=2**31)]
    descriptor: Annotated[int, Field(ge=0, lt=2**31)]
    name: Annotated[str, Field(pattern=r"^echo-[0-9a-f]{32}$")]


class ArtefactOffer(WireMessage):
    """All that a node needs to fetch and verify one artefact: the base model or one policy version."""

    manifest: Annotated[bytes, Field(max_length=2**20)]
    """Signed bytes of an `echo_shared.artefacts.manifest.Manifest`."""
    signature: Signature
    torrent: Annotated[bytes, Field(max_length=4 * 2**20)]
    web_seed_path: Annotated[str, Field(max_length=512, pattern=r"^/")]
    """Path of the artefact's directory under the node's secret path on the hub; ends in a slash."""
    way: Annotated[Way, Lax] = Way.SWARM
    """Transport that the hub uses. If it fails, the node falls back to BitTorrent, then to the web seed."""
    delta_parent: PolicyVersion | None = None
    """Version that the decoder of the delta needs, as in the manifest; None = the artefact is no delta."""
    peers: Annotated[tuple[Peer, ...], Field(max_length=64, strict=False)] = ()
    shared_memory: SharedMemory | None = None
    """Place of the artefact in the hub's memory, for a node on the hub's own host; None for other nodes."""


class PolicyPublished(WireMessage):
    """A new policy version is available."""

    type: Literal["policy_published"] = "policy_published"
    policy_version: PolicyVersion
    offer: ArtefactOffer


class Peers(WireMessage):
    """More peers for an artefact that the node is fetching or serving."""

    type: Literal["peers"] = "peers"
    info_hash: Annotated[bytes, Field(min_length=20, max_length=20)]
    peers: Annotated[tuple[Peer, ...], Field(max_length=64, strict=False)]


class KeysRotated(WireMessage):
    """The run's current keys. Earlier keys that are missing here are no longer used."""

    type: Literal["keys_rotated"] = "keys_rotated"
    run_keys: RunKeys


class Mesh(WireMessage):
    """The hub's complete list of the nodes to which the receiver should connect. It replaces the previous list."""

    type: Literal["mesh"] = "mesh"
    peers: MeshPeers


class Piece(WireMessage):
    """One piece of an artefact, sent by the hub or forwarded by a node. The receiver checks its hash.

    An empty piece, which only the hub sends, asks a node to forward a piece that the node already has.
    """

    type: Literal["piece"] = "piece"
    info_hash: InfoHash
    index: PieceIndex
    data: Annotated[bytes, Field(max_length=MAX_PIECE_BYTES)]
    hand_on: Annotated[bytes, Field(max_length=MAX_HAND_ON_BYTES)] = b""
    """Forwarding route: tree of the nodes that must forward the piece, starting with this node's receivers; encoded by
    `echo_shared.wire.relay_tree`.
    """


class MeetWanted(WireMessage):
    """The node wants to link with this peer through both routers: it asks the hub to send the peer a Meet. `answers`:
    True if this message answers the peer's own Meet.
    """

    type: Literal["meet_wanted"] = "meet_wanted"
    node_id: NodeId
    port: Annotated[int, Field(ge=FIRST_UNPRIVILEGED_PORT, le=65535)]
    """Local TCP port of this attempt, from which the node connects, and on which it listens."""
    sightings: Annotated[tuple[Sighting, ...], Field(max_length=2, strict=False)]
    """The hub's signed statements about the public address of `port`, for IPv4 and IPv6."""
    local_hosts: Annotated[tuple[Host, ...], Field(max_length=2, strict=False)] = ()
    """The node's private addresses, useful for peers behind the same router."""
    answers: bool = False


class Meet(WireMessage):
    """Order to connect to this peer now. The peer gets the same order, so both routers admit the packets."""

    type: Literal["meet"] = "meet"
    node_id: NodeId
    addresses: Annotated[tuple[PeerAddress, ...], Field(max_length=MAX_ADDRESSES, strict=False)]
    answers: bool = False
    """True: the peer answers this node's own MeetWanted. False: this node is to answer with a MeetWanted."""


class Unwanted(WireMessage):
    """No node fetches these artefacts any more: stop serving them."""

    type: Literal["unwanted"] = "unwanted"
    info_hashes: Annotated[tuple[InfoHash, ...], Field(max_length=256, strict=False)]


class Fetched(WireMessage):
    """An artefact has arrived and passed its hash and signature checks."""

    type: Literal["fetched"] = "fetched"
    info_hash: Annotated[bytes, Field(min_length=20, max_length=20)]
    policy_version: PolicyVersion | None
    """Policy version of the artefact; None for the base model."""
    seconds: Annotated[float, Field(ge=0)]
    swarm_bytes: Count
    web_seed_bytes: Count
    shared_memory_bytes: Count = 0
    pushed_bytes: Count = 0
    """Bytes of pieces sent by the hub over the websocket."""
    mesh_bytes: Count = 0
    """Bytes of pieces forwarded by other nodes."""
    model_hub_bytes: Count = 0
    """Bytes from a model hub, such as Hugging Face."""


class Have(WireMessage):
    """A node's report of the pieces that arrived, from hub or nodes, and match their hash."""

    type: Literal["have"] = "have"
    info_hash: InfoHash
    pieces: Annotated[tuple[PieceIndex, ...], Field(max_length=MAX_BATCHED, strict=False)]
    wanted: bool = True
    """False: the hub need not send the rest, because the node has all pieces or uses another transport."""


class Links(WireMessage):
    """The sending node's complete list of the nodes to which it is connected and can forward pieces."""

    type: Literal["links"] = "links"
    node_ids: Annotated[tuple[NodeId, ...], Field(max_length=MAX_MESH, strict=False)]
    punched: Annotated[tuple[NodeId, ...], Field(max_length=MAX_MESH, strict=False)] = ()
    """Subset of `node_ids` with links by hole punching (Meet)."""


class KeyframeWanted(WireMessage):
    """The node cannot decode the delta that it was offered, because its parent is missing or the result has a wrong
    hash. It asks for a keyframe.
    """

    type: Literal["keyframe_wanted"] = "keyframe_wanted"
    policy_version: PolicyVersion
