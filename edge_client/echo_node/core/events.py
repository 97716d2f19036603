"""Events of a node's work loop: messages from the hub, and facts that the other parts of the node report.

Events of an engine name the engine's `device`, like the effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from echo_node.core.manners import Hold
from echo_shared.errors import EchoError
from echo_shared.sampling.interface import DrawnPart, FinishedRollout
from echo_shared.sampling.scoring import Scored
from echo_shared.wire.messages import (
    CheckLease,
    Fetched,
    FromHub,
    Lease,
    LeaseRevoked,
    PolicyPublished,
    Receipts,
    Rollout,
    Standby,
    Welcome,
)

LossCause = Literal["died", "out_of_memory", "stopped", "no_weights"]
"""Cause of an engine's end. `stopped`: the node ended it, to use a better device or to free the machine for its owner.
`no_weights`: the engine needs the base model's own weights, but only another engine's conversion of them is on disk.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """The connection is lost. Leases continue; their results are sent after the next Welcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionEnded:
    """The connection has failed, and reconnecting cannot help."""

    error: EchoError


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgraded:
    """A newly installed release takes over."""

    release: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtefactReady:
    """The artefact is on disk and verified."""

    policy_version: int | None
    """None = the base model."""
    fetched: Fetched
    """Report of the artefact's fetch, which ended in this process or before a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """The artefact is missing, or differs from the signed manifest."""

    policy_version: int | None
    what: str
    unreadable: bool = False
    """True if the artefact arrived complete but does not decode to the signed content, or is a delta without its
    parent.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The engine has loaded the base model and samples up to `width` rollouts at the same time."""

    width: int
    tokens_per_s: float = 0.0
    """Measured speed; 0 = unknown."""
    precision: str = ""
    """Precision of the weights; empty = unknown."""
    scores: bool = False
    """True if the engine can recompute completions of other nodes."""
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    """The engine's process ended, or could not start."""

    what: str
    cause: LossCause = "died"
    width: int = 0
    """Width (rollouts at the same time) of the engine that ended; 0 = unknown, because the engine itself chose it."""
    code: str = ""
    """Code of the error that ended the engine."""
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPrepared:
    """The engine can switch to this version without a wait. Reported while another version samples."""

    policy_version: int
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsFinished:
    """The engine finished these rollouts, which may belong to several leases."""

    rollouts: tuple[FinishedRollout, ...]
    tokens_per_s: float
    """Tokens that the engine drew per second of sampling, averaged over its last seconds."""
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsDrawn:
    """Tokens of unfinished rollouts since the engine's last report, without prefixes."""

    parts: tuple[DrawnPart, ...]
    for_hub: bool = True
    """True if the node should now send these tokens, and all earlier unsent ones, to the hub."""
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionScored:
    """The engine's result for another node's completion; empty if the engine could not compute it."""

    scored: Scored
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCancelled:
    """The engine has stopped sampling for this lease, after it reported all tokens of the lease."""

    lease_id: int
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFailed:
    """The engine cannot sample the rest of this lease, but continues with other leases."""

    lease_id: int
    what: str
    code: str = ""
    """Code of the error for which the engine cannot sample the lease."""
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """These rollouts are stored on disk, and so is everything that the work loop asked to store before them."""

    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolFailed:
    """Writing to the spool (the node's store of rollouts) failed. The shell (the node's I/O) keeps the data and
    retries.
    """

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The current holds, each a reason to pause and leave the machine to its owner; none = the node may work."""

    holds: tuple[Hold, ...]
    """Holds (reasons to pause) of the whole node."""
    keep_memory_s: float
    """Seconds for which a paused engine keeps its model in memory."""
    of_devices: Mapping[str, tuple[Hold, ...]] = field(default_factory=dict)
    """Further holds (reasons to pause) of single devices, by device. The engines of other devices continue."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """For each device, the share of its time, above 0, that its engine may use. A device that is missing here may be
    used fully.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutdated:
    """The engine's settings have changed, so the engine must restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequested:
    """The user wants the node to finish its leases and then stop."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """The user or the system wants the node to stop now; unfinished leases go back to the hub."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTick:
    """Sent regularly, to check heartbeat, retries and deadlines."""

    progress: Mapping[int | None, tuple[int, int]] = field(default_factory=dict)
    """(bytes received, total bytes) of each running fetch, by version; None = the base model."""


Event = (
    Welcome
    | PolicyPublished
    | Lease
    | LeaseRevoked
    | CheckLease
    | Standby
    | Receipts
    | Disconnected
    | ArtefactReady
    | FetchFailed
    | EngineReady
    | EngineLost
    | PolicyPrepared
    | RolloutsFinished
    | RolloutsDrawn
    | CompletionScored
    | LeaseCancelled
    | LeaseFailed
    | Spooled
    | SpoolFailed
    | Holding
    | EngineOutdated
    | FinishRequested
    | DrainRequested
    | NodeTick
)
Incoming = FromHub | Event | ConnectionEnded | Upgraded
"""Content of the node's inbox: messages of the hub, and reports of the node's parts."""
