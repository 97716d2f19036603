"""How the base model and every policy version come to the nodes: offers, keys, peers, pieces, and what has arrived."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from echo_shared.messages.base import MAX_BATCHED, Message
from echo_shared.messages.fields import Count, InfoHash, Lax, NodeId, Peer, PieceIndex, PolicyVersion, Signature

MAX_MESH: Final = 32
"""Other nodes that one is linked with: all of them in a small fleet, random ones in a larger."""
MAX_HAND_ON_BYTES: Final = 48 * 1024
"""Of a piece's way: 16,384 nodes."""
MAX_PIECE_BYTES: Final = 256 * 1024
"""Of a piece that travels in a message; artefacts with larger pieces go through the swarm."""


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
    number: Annotated[int, Field(ge=0, le=65_535)]
    """What a piece's way calls it."""


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
    """One piece of an artefact, from the hub or from a node that hands it on; it counts once it matches its hash.

    Without data, which only the hub sends, it is one that the node has, and is to hand on.
    """

    type: Literal["piece"] = "piece"
    info_hash: InfoHash
    index: PieceIndex
    data: Annotated[bytes, Field(max_length=MAX_PIECE_BYTES)]
    hand_on: Annotated[bytes, Field(max_length=MAX_HAND_ON_BYTES)] = b""
    """To which nodes that it is linked with the node is to send it, and they to others: `echo_shared.relay_tree`."""


class Unwanted(Message):
    """Nobody fetches these artefacts any more: they need not be served."""

    type: Literal["unwanted"] = "unwanted"
    info_hashes: Annotated[tuple[InfoHash, ...], Field(max_length=256, strict=False)]


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
