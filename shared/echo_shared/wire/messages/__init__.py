"""Every message that hub and node exchange, with the bounds of each field.

A message is one MessagePack map (`codec`) whose `type` names its class. The codec ignores unknown fields, because a
newer peer may send more. A wrong type, a missing field or a value out of bounds raises CodecError before any other code
sees the message. Arrays travel as {dtype, shape, data} with raw little-endian bytes, never as pickle.

Reading order: `handshake`, `spread`, `leases`, `rollouts`, `receipts`, `checking`, `teams`,
`fleet`. The unions `FromHub` and
`FromNode` below list every message that each side may send.
"""

from echo_shared.wire.messages.base import (
    MAX_BATCHED,
    MAX_FRAME_BYTES,
    MAX_FRAME_FROM_NODE_BYTES,
    MAX_GROUP_SIZE,
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    WireMessage,
)
from echo_shared.wire.messages.checking import MAX_CHECKS, CheckLease, CheckResult
from echo_shared.wire.messages.fleet import (
    COMMAND_ID_BYTES,
    MAX_FLEET,
    Fleet,
    FleetCommand,
    FleetNode,
    FleetReport,
    FleetWanted,
    OwnerClaim,
)
from echo_shared.wire.messages.handshake import (
    MAX_COST_PER_HOUR,
    MAX_POWER_WATTS,
    MAX_REFUSED_TENANTS,
    Challenge,
    Goodbye,
    Hello,
    Proof,
    RefusalCode,
    Refused,
    Welcome,
)
from echo_shared.wire.messages.leases import (
    MAX_PREFIX_TOKENS,
    Lease,
    LeasedPrefix,
    LeaseReturned,
    LeaseRevoked,
    NodeStatus,
    Standby,
    StandbyReason,
)
from echo_shared.wire.messages.receipts import (
    Checked,
    DroppedCount,
    DropReason,
    Receipt,
    Receipts,
    ReceiptState,
    ReceiptsWanted,
    Totals,
)
from echo_shared.wire.messages.rollouts import (
    CONTENT,
    MAX_PARTS_TOKENS,
    MAX_ROUTES_BYTES,
    MAX_VERSION_SPANS,
    NO_ROUTE,
    Completion,
    FinishReason,
    Rollout,
    RolloutPart,
    RolloutParts,
    VersionSpan,
    VersionSpans,
    content_of,
    rollout_id,
)
from echo_shared.wire.messages.spread import (
    FIRST_UNPRIVILEGED_PORT,
    MAX_ADDRESSES,
    MAX_HAND_ON_BYTES,
    MAX_MESH,
    MAX_PIECE_BYTES,
    ArtefactOffer,
    Fetched,
    Have,
    KeyframeWanted,
    KeysRotated,
    Links,
    Meet,
    MeetWanted,
    Mesh,
    MeshPeer,
    MeshPeers,
    Peers,
    Piece,
    PolicyPublished,
    RunKey,
    RunKeys,
    SharedMemory,
    Unwanted,
    Way,
)
from echo_shared.wire.messages.teams import MAX_TEAM_NAME, Team, TeamWanted

__all__ = [
    "COMMAND_ID_BYTES",
    "CONTENT",
    "FIRST_UNPRIVILEGED_PORT",
    "MAX_ADDRESSES",
    "MAX_BATCHED",
    "MAX_CHECKS",
    "MAX_COST_PER_HOUR",
    "MAX_FLEET",
    "MAX_FRAME_BYTES",
    "MAX_FRAME_FROM_NODE_BYTES",
    "MAX_GROUP_SIZE",
    "MAX_HAND_ON_BYTES",
    "MAX_MESH",
    "MAX_PARTS_TOKENS",
    "MAX_PIECE_BYTES",
    "MAX_POWER_WATTS",
    "MAX_PREFIX_TOKENS",
    "MAX_REFUSED_TENANTS",
    "MAX_ROUTES_BYTES",
    "MAX_TEAM_NAME",
    "MAX_VERSION_SPANS",
    "NO_ROUTE",
    "OLDEST_PROTOCOL_VERSION",
    "PROTOCOL_VERSION",
    "ArtefactOffer",
    "Challenge",
    "CheckLease",
    "CheckResult",
    "Checked",
    "Completion",
    "DropReason",
    "DroppedCount",
    "Fetched",
    "FinishReason",
    "Fleet",
    "FleetCommand",
    "FleetNode",
    "FleetReport",
    "FleetWanted",
    "FromHub",
    "FromNode",
    "Goodbye",
    "Have",
    "Hello",
    "KeyframeWanted",
    "KeysRotated",
    "Lease",
    "LeaseReturned",
    "LeaseRevoked",
    "LeasedPrefix",
    "Links",
    "Meet",
    "MeetWanted",
    "Mesh",
    "MeshPeer",
    "MeshPeers",
    "NodeStatus",
    "OwnerClaim",
    "Peers",
    "Piece",
    "PolicyPublished",
    "Proof",
    "Receipt",
    "ReceiptState",
    "Receipts",
    "ReceiptsWanted",
    "RefusalCode",
    "Refused",
    "Rollout",
    "RolloutPart",
    "RolloutParts",
    "RunKey",
    "RunKeys",
    "SharedMemory",
    "Standby",
    "StandbyReason",
    "Team",
    "TeamWanted",
    "Totals",
    "Unwanted",
    "VersionSpan",
    "VersionSpans",
    "Way",
    "Welcome",
    "WireMessage",
    "content_of",
    "rollout_id",
]

FromHub = (
    Challenge
    | Welcome
    | Refused
    | PolicyPublished
    | Peers
    | KeysRotated
    | Mesh
    | Meet
    | Piece
    | Unwanted
    | Lease
    | LeaseRevoked
    | CheckLease
    | Standby
    | Receipts
    | Totals
    | FleetCommand
    | Team
    | Fleet
)
FromNode = (
    Hello
    | Proof
    | NodeStatus
    | Fetched
    | Have
    | Links
    | MeetWanted
    | KeyframeWanted
    | Rollout
    | RolloutParts
    | LeaseReturned
    | CheckResult
    | ReceiptsWanted
    | FleetReport
    | TeamWanted
    | FleetWanted
    | Goodbye
)
