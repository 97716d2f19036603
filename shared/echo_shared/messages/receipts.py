"""What became of each rollout, as the hub's books have it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from echo_shared.messages.base import MAX_BATCHED, Message
from echo_shared.messages.fields import Count, Lax, Name, RolloutId


class ReceiptState(StrEnum):
    """Where a rollout is on its way; TRAINED, EVALUATED and DROPPED are final."""

    LEASED = "leased"
    """A node is to draw it until its lease's deadline."""
    RECEIVED = "received"
    """The hub has committed it."""
    SCORED = "scored"
    """It has its reward, and waits for a step's batch."""
    TRAINED = "trained"
    """A step has trained on it."""
    EVALUATED = "evaluated"
    """It has shown how good its version is, on a problem that is never trained on."""
    DROPPED = "dropped"
    """It was of no use, for one of the drop reasons."""


class DropReason(StrEnum):
    """Why a leased rollout was of no use. Every dropped rollout has exactly one."""

    STALE = "stale"
    """Its oldest token, or that of another of its group, was over the staleness bound when it was to be trained on."""
    EXPIRED = "expired"
    """It had not come back when its group was complete without it: another node was given the same work."""
    DUPLICATE = "duplicate"
    """It came when another node's result for the same work had been taken."""
    RETURNED = "returned"
    """Its node gave it back unfinished; or its group was given up, for that happened too often."""
    REVOKED = "revoked"
    """Taken back by the hub: it could not be there in time any more, its evaluation was made smaller, or it goes on
    from what a node drew that is not trusted."""
    INVALID = "invalid"
    """What came is not what was leased."""
    SCORER_FAILED = "scorer_failed"
    """The task's scorer raised an error, took too long, or gave what is no reward of its task."""
    NO_ADVANTAGE = "no_advantage"
    """All rewards of its group were equal, and another group was sampled in its place (training.dynamic_sampling)."""
    FORGED = "forged"
    """Computed again, it is not what its policy version draws."""
    QUARANTINED = "quarantined"
    """Of a node that is not trusted any more, and not consumed yet."""
    RUN_ENDED = "run_ended"
    """Left over when the run was at its end."""
    SCREENED = "screened"
    """The learner's own forward pass showed that no honest engine gives it, or another of its group."""


class Checked(StrEnum):
    """Whether the hub has computed a rollout again, and what it found of what the rollout's own node drew."""

    NO = "no"
    """It has not been computed again."""
    PASSED = "passed"
    """It is what its policy version draws."""
    FAILED = "failed"
    """It is not."""


def check_in_words(checked: str, drop_reason: str | None) -> str:
    """What people read of a check, given values of `Checked` and `DropReason`: a rollout that passed its own check may
    still be dropped for what its node did elsewhere."""
    if checked == Checked.PASSED and drop_reason == DropReason.QUARANTINED:
        return "passed; its node was quarantined later"
    return checked


class Receipt(Message):
    """One rollout's state on the hub, as committed in its store."""

    rollout_id: RolloutId
    state: Annotated[ReceiptState, Lax]
    drop_reason: Annotated[DropReason, Lax] | None = None
    checked: Annotated[Checked, Lax] = Checked.NO
    """Never taken back: a later receipt that says no says nothing of it."""


class Receipts(Message):
    """States that the hub has committed. The first for a rollout is its ack: the node may forget the payload."""

    type: Literal["receipts"] = "receipts"
    receipts: Annotated[tuple[Receipt, ...], Field(max_length=MAX_BATCHED, strict=False)]


class ReceiptsWanted(Message):
    """The node knows no final state of these rollouts, which the hub has: receipts sent while it was away are lost."""

    type: Literal["receipts_wanted"] = "receipts_wanted"
    rollout_ids: Annotated[tuple[RolloutId, ...], Field(min_length=1, max_length=MAX_BATCHED, strict=False)]


class DroppedCount(Message):
    """How many rollouts were dropped for one reason; a newer hub may name reasons that are not known here."""

    reason: Name
    rollouts: Count


class Totals(Message):
    """What the node's key has done in this run over all time, by the hub's books, and its place on the leaderboard.

    Sent soon after the Welcome, then now and then when it has changed, to nodes whose Proof says `hears_totals`.
    """

    type: Literal["totals"] = "totals"
    trained_rollouts: Count
    trained_tokens: Count
    """Those that this node drew."""
    evaluated_rollouts: Count
    dropped: Annotated[tuple[DroppedCount, ...], Field(max_length=64, strict=False)] = ()
    others_checked: Count = 0
    """Rollouts of others that it has computed again, and whose finding stands."""
    share: Annotated[float, Field(ge=0, le=1)]
    """Of all rollouts that were trained on or evaluated."""
    rank: Annotated[int, Field(ge=1, le=2**53)] | None
    """By share, largest first; None = nothing of it was of use yet."""
    num_ranked: Count
    """Nodes that have a rank."""
    page: Annotated[str, Field(max_length=256, pattern=r"^/[!-~]*$")]
    """Path of the node's own place on the hub's pages."""
