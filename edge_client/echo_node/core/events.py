"""Events of a node's work loop: messages from the hub, and facts that the other parts of the node report."""

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
"""Cause of an engine's end. `stopped`: the node ended it, for an engine on a better device or for the machine's owner.
`no_weights`: it reads the base model's weights, but only another engine's conversion is on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """The connection is lost. Leases continue; their results are sent after the next Welcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionEnded:
    """The connection has failed for good."""

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
    """Report of the fetch that brought the artefact, in this process or before a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """The artefact did not arrive, or differs from the hub's signature."""

    policy_version: int | None
    what: str
    unreadable: bool = False
    """True if the artefact arrived complete but cannot be decoded to the signed content, or is a delta without its
    parent.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The engine has the base loaded and samples up to `width` rollouts at once."""

    width: int
    tokens_per_s: float = 0.0
    """Measured speed; 0 = unknown."""
    precision: str = ""
    """Precision of the weights; empty = unknown."""
    scores: bool = False
    """True if the engine can recompute completions of other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    """The engine's process ended, or could not start."""

    what: str
    cause: LossCause = "died"
    width: int = 0
    """Width of the engine that ended; 0 = chosen by the engine and unknown."""
    code: str = ""
    """Code of the error that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPrepared:
    """The engine can switch to this version at once. Reported while it samples with another."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsFinished:
    """The engine completed these rollouts, of one lease or several."""

    rollouts: tuple[FinishedRollout, ...]
    tokens_per_s: float
    """Drawn tokens per second of the busy engine over the last seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsDrawn:
    """Tokens of rollouts in progress since the engine's last report, without prefixes."""

    parts: tuple[DrawnPart, ...]
    for_hub: bool = True
    """True if the hub should get these tokens and all earlier unsent ones now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionScored:
    """The engine's result for another node's completion, possibly none."""

    scored: Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCancelled:
    """The engine has stopped sampling for this lease. All its tokens were reported before."""

    lease_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFailed:
    """The engine cannot sample the rest of this lease. The engine itself continues."""

    lease_id: int
    what: str
    code: str = ""
    """Code of the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """These rollouts are stored on disk, and so is everything that the work loop asked to store before them."""

    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolFailed:
    """A spool write failed. The shell keeps the data and retries."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The current holds, which keep the node from using the machine; none = it may work."""

    holds: tuple[Hold, ...]
    keep_memory_s: float
    """See `MannersConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutdated:
    """The engine's settings have changed: it must restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequested:
    """The user wants the node to finish its leases and then stop."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """The user or the machine wants the node to stop."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Regular event: check heartbeat, retries and deadlines."""

    progress: Mapping[int | None, tuple[int, int]] = field(default_factory=dict)
    """(bytes received, total bytes) of each started fetch; None = the base model's."""


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
    | Tick
)
"""Event that the work loop handles."""
Incoming = FromHub | Event | ConnectionEnded | Upgraded
"""Content of the node's inbox: messages of the hub, and reports of the node's parts."""
