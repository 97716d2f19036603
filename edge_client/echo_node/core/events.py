"""What can happen to a node's work loop: what the hub says, as its message, and facts from the shells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from echo_node.core.manners import Hold
from echo_shared.messages import (
    CheckLease,
    Fetched,
    Lease,
    LeaseRevoked,
    PolicyPublished,
    Receipts,
    Rollout,
    Standby,
    Welcome,
)
from echo_shared.sampling import DrawnPart, FinishedRollout
from echo_shared.scoring import Scored

LossCause = Literal["died", "out_of_memory", "stopped", "no_weights"]
"""Why an engine is gone; `stopped`: the node ended it, for one on a better device or for the machine's owner;
`no_weights`: it reads the base model's weights, of which only another engine's conversion is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """The connection is gone. Held leases go on: what they give is sent after the next Welcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtefactReady:
    """The artefact is on disk and verified."""

    policy_version: int | None
    """None = the base model."""
    fetched: Fetched
    """How it came, now or before a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """The artefact did not arrive, or is not what the hub signed."""

    policy_version: int | None
    what: str
    unreadable: bool = False
    """It came whole, as the hub sent it, and does not make what the hub signed; or it is a delta without its parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The engine has the base loaded and samples up to `width` rollouts at once."""

    width: int
    tokens_per_s: float = 0.0
    """As measured beforehand; 0 = unknown."""
    precision: str = ""
    """Of its weights; empty = not known."""
    scores: bool = False
    """It can compute completions of others again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    """The engine's process ended, or could not start."""

    what: str
    cause: LossCause = "died"
    width: int = 0
    """With which it ran or was to start; 0 = its own choice, which is not known."""
    code: str = ""
    """Of the error that it ended with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPrepared:
    """The engine can draw by this version at once. Told while it draws by another."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsFinished:
    """The engine completed these rollouts, of one lease or several."""

    rollouts: tuple[FinishedRollout, ...]
    tokens_per_s: float
    """The engine's rate while it is busy, over the last seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsDrawn:
    """What rollouts in progress have drawn since the engine told last, or since they began behind their prefix."""

    parts: tuple[DrawnPart, ...]
    for_hub: bool = True
    """It is time that the hub hears of this, and of what was told before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionScored:
    """What the engine found of another node's completion, or that it can tell nothing."""

    scored: Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCancelled:
    """The engine has stopped sampling for this lease, and has told all that it drew for it."""

    lease_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailed:
    """The engine cannot sample what is left of this lease; the engine itself goes on."""

    lease_id: int
    what: str
    code: str = ""
    """Of the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """These rollouts are on disk to stay, and so is all that was to be spooled before them."""

    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolFailed:
    """The spool could not be written; its shell keeps what it was given and tries again."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What keeps the node from using the machine, from now on; nothing = it may go on."""

    holds: tuple[Hold, ...]
    keep_memory_s: float
    """See `MannersConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutdated:
    """What the engine was started with holds no longer: it is to end, and to start again with what does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequested:
    """The user wants the node to end what it holds, and then to stop."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """The user or the machine wants the node to stop."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed: heartbeat, retries and deadlines are looked at."""

    progress: Mapping[int | None, tuple[int, int]] = field(default_factory=dict)
    """(bytes there, bytes in all) of each fetch under way that has begun; None = the base model's."""


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
    | GroupFailed
    | Spooled
    | SpoolFailed
    | Holding
    | EngineOutdated
    | FinishRequested
    | DrainRequested
    | Tick
)
