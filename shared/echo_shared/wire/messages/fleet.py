"""Fleet: the list of one owner's nodes, and commands between these nodes, relayed by the hub.

    one machine  ── FleetWanted (HTTP) ──►  hub  ── FleetCommand ──►  other nodes of the owner
                 ◄── Fleet ───────────────       ◄── FleetReport ───

The hub reads neither `body`. A command is signed with the owner's key, a report with the key of the node that made it
(`echo_shared.wire.owner_commands`).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from echo_shared.wire.messages.base import WireMessage
from echo_shared.wire.messages.fields import Count, Lax, Name, NodeId, PublicKey, Signature

MAX_FLEET: Final = 256
"""Maximum number of an owner's nodes in one answer of the hub; those that were seen last come first."""
COMMAND_ID_BYTES: Final = 16

CommandId = Annotated[bytes, Field(min_length=COMMAND_ID_BYTES, max_length=COMMAND_ID_BYTES)]
CommandBody = Annotated[bytes, Field(max_length=1_024)]
ReportBody = Annotated[bytes, Field(max_length=4_096)]


class OwnerClaim(WireMessage):
    """The owner's signature that a node is the owner's (`echo_shared.signing.owner`)."""

    owner_key: PublicKey
    signature: Signature


class FleetCommand(WireMessage):
    """A command of the owner to one or more nodes. `signature` is made with the owner's key."""

    type: Literal["fleet_command"] = "fleet_command"
    body: CommandBody
    signature: Signature


class FleetReport(WireMessage):
    """A node's answer to a command. `signature` is made with the node's key."""

    type: Literal["fleet_report"] = "fleet_report"
    command_id: CommandId
    body: ReportBody
    signature: Signature


class FleetWanted(WireMessage):
    """Ask for the owner's nodes, after passing on a command or changing how the leaderboard counts them. The answer is
    Fleet or Refused.
    """

    type: Literal["fleet_wanted"] = "fleet_wanted"
    owner: OwnerClaim
    """The owner's signature that the asking node is the owner's."""
    command: FleetCommand | None = None
    """Command for the connected nodes in `to`. The hub waits a few seconds for their reports."""
    to: Annotated[tuple[NodeId, ...], Lax, Field(max_length=MAX_FLEET)] = ()
    counts_once: bool | None = None
    """True: the leaderboard shows the owner's nodes as one entry. False: it shows each node. None: the setting stays.
    """


class FleetNode(WireMessage):
    """One of the owner's nodes, as the hub knows it."""

    node_key: PublicKey
    claim: Signature
    """The owner's signature, which proves that the node belongs to the owner."""
    name: Name
    is_connected: bool
    last_seen: Annotated[float, Field(ge=0)]
    """Time when the hub last heard from the node, in seconds since the epoch."""
    rollouts: Count = 0
    """Rollouts trained on or evaluated. `tokens` counts their tokens."""
    tokens: Count = 0
    report: FleetReport | None = None
    """Answer to the command of the request; None if the node got no command, or sent no answer in time."""


class Fleet(WireMessage):
    """The hub's list of an owner's nodes: its answer to FleetWanted."""

    type: Literal["fleet"] = "fleet"
    counts_once: bool = False
    num_nodes: Count = 0
    """Number of all nodes of the owner. `nodes` lists at most `MAX_FLEET` of them."""
    nodes: Annotated[tuple[FleetNode, ...], Lax, Field(max_length=MAX_FLEET)] = ()
