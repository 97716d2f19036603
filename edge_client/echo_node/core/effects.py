"""Effects of the work loop, which the shell (`echo_node.shell`) carries out in order. An effect returns no result: "the
shell answers with X" means that the shell later passes the event X to the work loop.

Effects for an engine name the engine's `device`, as the setting `devices` does; "" = the only engine of a node that
chooses its device itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_shared.sampling.interface import GroupRequest
from echo_shared.sampling.scoring import ScoreRequest
from echo_shared.wire.messages import ArtefactOffer, FromNode, Receipt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchArtefact:
    """Start a fetch. The shell (the node's I/O) answers with ArtefactReady or FetchFailed. `policy_version` None = the
    base model.
    """

    policy_version: int | None
    offer: ArtefactOffer
    gguf: ArtefactOffer | None = None
    """The base model as a GGUF file. The shell fetches it in place of `offer` if the node's engine can read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonFetch:
    """Stop the fetch of this version and delete its files. The shell (the node's I/O) does not answer."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveArtefact:
    """Delete the files of this version. Its carrier (the encrypted copy for other nodes) may still be served."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """Start the engine's process after a wait. The shell (the node's I/O) answers with EngineReady or EngineLost."""

    after_s: float
    max_width: int = 0
    """Largest width (rollouts sampled at the same time) that fits into memory; 0 = no new limit."""
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendEngine:
    """Pause all threads of the engine. Its memory stays allocated."""

    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeEngine:
    """Let the threads of a suspended engine continue."""

    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEngine:
    """End the engine's process at once, in any state. The shell (the node's I/O) answers with EngineLost, whose cause
    is `stopped`.
    """

    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitDuty:
    """Let the engine use at most this share of its device's time. A new engine uses all of it."""

    share: float
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPolicy:
    """Make a version known to the engine, before any group that uses it. Version 0 is the base model
    without adapter.
    """

    policy_version: int
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPolicy:
    """Make the engine forget this version."""

    policy_version: int
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitGroup:
    """Sample a group. The shell (the node's I/O) answers with RolloutsFinished for each index, or with GroupFailed."""

    request: GroupRequest
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelLease:
    """Stop sampling for this lease. The shell (the node's I/O) answers with LeaseCancelled after all tokens of the
    lease. The lease may be submitted again.
    """

    lease_id: int
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCompletion:
    """Recompute a completion of another node when the engine has time. The shell (the node's I/O) answers with
    CompletionScored.
    """

    request: ScoreRequest
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolLease:
    """Store on disk which rollouts are leased, so that a restarted node can return them."""

    lease_id: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetLease:
    """Remove from disk a lease that the node no longer holds."""

    lease_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolRollout:
    """Store a finished rollout on disk. The shell (the node's I/O) answers with Spooled."""

    rollout: Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordReceipts:
    """Store the hub's receipts on disk."""

    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResendSpooled:
    """Send all stored rollouts that have no receipt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForReceipts:
    """Ask the hub for the states of those rollouts of this node whose final state the node has not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessage:
    """Send a message to the hub. Without a connection the message is dropped; rollouts that must arrive are on disk."""

    message: FromNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the daemon: everything is returned, stored and sent."""


EngineEffect = (
    StartEngine
    | SuspendEngine
    | ResumeEngine
    | EndEngine
    | LimitDuty
    | AddPolicy
    | DropPolicy
    | SubmitGroup
    | CancelLease
    | ScoreCompletion
)
SpoolEffect = SpoolLease | ForgetLease | SpoolRollout | RecordReceipts
Effect = (
    FetchArtefact
    | AbandonFetch
    | RemoveArtefact
    | EngineEffect
    | SpoolEffect
    | ResendSpooled
    | AskForReceipts
    | SendMessage
    | Stop
)
