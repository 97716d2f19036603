"""What the work loop wants done. Effects are carried out in order; none of them is an answer to wait for."""

from __future__ import annotations

from dataclasses import dataclass

from echo_shared.messages import ArtefactOffer, FromNode, Receipt, Rollout
from echo_shared.sampling import GroupRequest
from echo_shared.scoring import ScoreRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchArtefact:
    """Start fetching; answer ArtefactReady or FetchFailed. `policy_version` None = the base model."""

    policy_version: int | None
    offer: ArtefactOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonFetch:
    """Stop fetching this version, delete what has come of it, and answer nothing."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveArtefact:
    """Delete the files of this version. What it came in may go on being served."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """Start the engine's process after a wait; answer EngineReady or EngineLost."""

    after_s: float
    max_width: int = 0
    """Rollouts at once that its memory is likely to suffice for; 0 = nothing new is known of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendEngine:
    """Stop every thread of the engine where it is; its memory stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeEngine:
    """Let a suspended engine go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEngine:
    """End the engine's process at once, started or not, suspended or not; answer EngineLost, as `stopped`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPolicy:
    """Make a version known to the engine, before any group that names it. Version 0 is the base itself."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPolicy:
    """The engine may forget this version."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitGroup:
    """Sample; answer RolloutsFinished for each index, or GroupFailed."""

    request: GroupRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelLease:
    """Stop sampling for this lease; answer LeaseCancelled after all that it has drawn. It may be submitted again."""

    lease_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCompletion:
    """Compute a completion of another node again, beside the sampling; answer CompletionScored."""

    request: ScoreRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolLease:
    """Remember on disk that the node holds these rollouts, so that a restarted node can return them."""

    lease_id: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetLease:
    """The node no longer holds this lease."""

    lease_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolRollout:
    """Put a finished rollout on disk; answer Spooled."""

    rollout: Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordReceipts:
    """Put what the hub has acknowledged on disk."""

    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResendSpooled:
    """Send all rollouts that are on disk without a receipt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForReceipts:
    """Ask the hub for the states of the rollouts that it has and whose final state is not on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send to the hub. Dropped when the connection is gone; what must arrive is in the spool."""

    message: FromNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """All is returned, spooled and said: the daemon may end."""


Effect = (
    FetchArtefact
    | AbandonFetch
    | RemoveArtefact
    | StartEngine
    | SuspendEngine
    | ResumeEngine
    | EndEngine
    | AddPolicy
    | DropPolicy
    | SubmitGroup
    | CancelLease
    | ScoreCompletion
    | SpoolLease
    | ForgetLease
    | SpoolRollout
    | RecordReceipts
    | ResendSpooled
    | AskForReceipts
    | Send
    | Stop
)
SpoolEffect = SpoolLease | ForgetLease | SpoolRollout | RecordReceipts
