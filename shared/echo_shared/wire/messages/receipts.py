"""Receipts: the state of each rollout in the hub's database."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from echo_shared.wire.messages.base import MAX_BATCHED, Message
from echo_shared.wire.messages.fields import Count, Lax, Name, RolloutId


class ReceiptState(StrEnum):
    """State of a rollout on the hub; TRAINED, EVALUATED and DROPPED are final."""

    LEASED = "leased"
    """A node holds the lease, until its deadline."""
    RECEIVED = "received"
    """The hub has stored the rollout."""
    SCORED = "scored"
    """The rollout has its reward and waits for a training batch."""
    TRAINED = "trained"
    """A training step used the rollout."""
    EVALUATED = "evaluated"
    """The rollout counted in an evaluation of its version, on a held-out problem."""
    DROPPED = "dropped"
    """The rollout was not used; the drop reason says why."""


class DropReason(StrEnum):
    """Reason why a leased rollout was not used. Every dropped rollout has exactly one."""

    STALE = "stale"
    """The oldest token of its group exceeded the staleness bound when the group was due for training."""
    EXPIRED = "expired"
    """The rollout was late: its work was leased again, and its group completed without it."""
    DUPLICATE = "duplicate"
    """Another node's result for the same work arrived first."""
    RETURNED = "returned"
    """The node returned it unfinished, or its group was abandoned after too many returns."""
    REVOKED = "revoked"
    """The hub revoked it: it would have come too late, its evaluation was made smaller, or it continued tokens of a
    node that lost the hub's trust."""
    INVALID = "invalid"
    """The message did not match its lease."""
    SCORER_FAILED = "scorer_failed"
    """The task's scorer raised an error, timed out, or returned no valid reward."""
    NO_ADVANTAGE = "no_advantage"
    """All rewards of its group were equal, and another group replaced it (training.dynamic_sampling)."""
    FORGED = "forged"
    """A check showed that its policy version does not draw these tokens."""
    QUARANTINED = "quarantined"
    """Its node lost the hub's trust before the rollout was used."""
    RUN_ENDED = "run_ended"
    """The run ended before the rollout was used."""
    SCREENED = "screened"
    """The learner's forward pass showed that no honest engine produces this rollout, or another one of its group."""


class Checked(StrEnum):
    """Result of the hub's check of the tokens that the rollout's own node drew."""

    NO = "no"
    """Not checked."""
    PASSED = "passed"
    """The policy version draws these tokens."""
    FAILED = "failed"
    """The policy version does not draw these tokens."""


def check_in_words(checked: str, drop_reason: str | None) -> str:
    """Return the check's result as shown to people, from values of `Checked` and `DropReason`.

    A passed rollout is still dropped if its node is quarantined for other rollouts.
    """
    if checked == Checked.PASSED and drop_reason == DropReason.QUARANTINED:
        return "passed; its node was quarantined later"
    return checked


class Receipt(Message):
    """State of one rollout, as committed in the hub's store."""

    rollout_id: RolloutId
    state: Annotated[ReceiptState, Lax]
    drop_reason: Annotated[DropReason, Lax] | None = None
    checked: Annotated[Checked, Lax] = Checked.NO
    """A result is never withdrawn: NO in a later receipt carries no information."""


class Receipts(Message):
    """States that the hub has committed. The first one of a rollout is its ack: the node may delete the payload."""

    type: Literal["receipts"] = "receipts"
    receipts: Annotated[tuple[Receipt, ...], Field(max_length=MAX_BATCHED, strict=False)]


class ReceiptsWanted(Message):
    """Ask for the state of rollouts whose final state the node does not know, because receipts sent while it was
    disconnected are lost."""

    type: Literal["receipts_wanted"] = "receipts_wanted"
    rollout_ids: Annotated[tuple[RolloutId, ...], Field(min_length=1, max_length=MAX_BATCHED, strict=False)]


class DroppedCount(Message):
    """Number of rollouts dropped for one reason; a newer hub may send reasons that are unknown here."""

    reason: Name
    rollouts: Count


class Totals(Message):
    """The node key's totals in this run, from the hub's database, and its place on the leaderboard.

    Sent soon after Welcome, and later on change, to nodes whose Proof sets `hears_totals`.
    """

    type: Literal["totals"] = "totals"
    trained_rollouts: Count
    trained_tokens: Count
    """Tokens drawn by this node, without leased prefixes."""
    evaluated_rollouts: Count
    dropped: Annotated[tuple[DroppedCount, ...], Field(max_length=64, strict=False)] = ()
    others_checked: Count = 0
    """Checks of other nodes' rollouts that this node made and the hub upheld."""
    share: Annotated[float, Field(ge=0, le=1)]
    """Fraction of all trained and evaluated rollouts."""
    rank: Annotated[int, Field(ge=1, le=2**53)] | None
    """Rank by share, largest first; None = no rollout was used yet."""
    num_ranked: Count
    """Number of nodes that have a rank."""
    page: Annotated[str, Field(max_length=256, pattern=r"^/[!-~]*$")]
    """Path of the node's page on the hub."""
