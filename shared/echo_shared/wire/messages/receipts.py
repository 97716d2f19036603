"""Receipts: the state of each rollout in the hub's database."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from echo_shared.wire.messages.base import MAX_BATCHED, WireMessage
from echo_shared.wire.messages.fields import Count, Lax, Name, RolloutId


class ReceiptState(StrEnum):
    """State of a rollout on the hub. TRAINED, EVALUATED, ANSWERED and DROPPED are final."""

    LEASED = "leased"
    """A node holds the lease until its deadline."""
    RECEIVED = "received"
    """The hub has stored the rollout."""
    SCORED = "scored"
    """The rollout has its reward and waits for a training batch."""
    TRAINED = "trained"
    """A training step used the rollout."""
    EVALUATED = "evaluated"
    """The rollout, on a held-out problem, counted in an evaluation of its version."""
    ANSWERED = "answered"
    """The rollout was delivered to the tenant of its request. Nodes whose Proof does not set `knows_answered` are
    told EVALUATED."""
    DROPPED = "dropped"
    """The rollout was not used; the drop reason says why."""


class DropReason(StrEnum):
    """Reason why a leased rollout was not used. Every dropped rollout has exactly one."""

    STALE = "stale"
    """The oldest token of the rollout's group was staler than the limit when the group was due for training."""
    EXPIRED = "expired"
    """The rollout came too late: other nodes had completed its group by then."""
    DUPLICATE = "duplicate"
    """Another node's result for the same work arrived first."""
    RETURNED = "returned"
    """The node returned the rollout unfinished, or the hub gave up its group after too many returns."""
    REVOKED = "revoked"
    """The hub revoked the lease: the rollout would have come too late, its evaluation was made smaller, its request was
    cancelled, or it continued tokens of a node that lost the hub's trust.
    """
    INVALID = "invalid"
    """The node's message did not match the lease."""
    SCORER_FAILED = "scorer_failed"
    """The task's scorer raised an error, timed out, or returned no valid reward."""
    NO_ADVANTAGE = "no_advantage"
    """All rewards of the rollout's group were equal, and another group replaced it (training.dynamic_sampling)."""
    FORGED = "forged"
    """A check showed that the claimed policy version does not draw these tokens."""
    QUARANTINED = "quarantined"
    """The rollout's node lost the hub's trust before the rollout was used."""
    RUN_ENDED = "run_ended"
    """The run ended before the rollout was used."""
    SCREENED = "screened"
    """The learner's forward pass showed that no honest engine produces this rollout, or another rollout of
    its group.
    """
    SESSION_LOST = "session_lost"
    """The rollout's environment was lost, or answered differently after it was rebuilt, so an earlier turn of the
    episode is void. No node is at fault. Nodes whose Proof does not set `knows_session_lost` are told EXPIRED instead.
    """


class Checked(StrEnum):
    """Result of the hub's check of a rollout. The check covers only the tokens that the rollout's own node drew."""

    NO = "no"
    """Not checked."""
    PASSED = "passed"
    """The policy version draws these tokens."""
    FAILED = "failed"
    """The policy version does not draw these tokens."""


def check_in_words(checked: str, drop_reason: str | None) -> str:
    """Return a check's result in words for people, from values of `Checked` and `DropReason`.

    A rollout that passed its check is still dropped if its node is quarantined for other rollouts.
    """
    if checked == Checked.PASSED and drop_reason == DropReason.QUARANTINED:
        return "passed; its node was quarantined later"
    return checked


class Receipt(WireMessage):
    """State of one rollout, as committed in the hub's database."""

    rollout_id: RolloutId
    state: Annotated[ReceiptState, Lax]
    drop_reason: Annotated[DropReason, Lax] | None = None
    checked: Annotated[Checked, Lax] = Checked.NO
    """Result of the check. A known result stays valid: NO in a later receipt carries no information."""


class Receipts(WireMessage):
    """States that the hub has committed. A rollout's first receipt is its acknowledgement: the node may then delete its
    data.
    """

    type: Literal["receipts"] = "receipts"
    receipts: Annotated[tuple[Receipt, ...], Field(max_length=MAX_BATCHED, strict=False)]


class ReceiptsWanted(WireMessage):
    """Ask for the state of rollouts whose final state the node does not know: receipts that the hub sent while the node
    was disconnected are lost.
    """

    type: Literal["receipts_wanted"] = "receipts_wanted"
    rollout_ids: Annotated[tuple[RolloutId, ...], Field(min_length=1, max_length=MAX_BATCHED, strict=False)]


class DroppedCount(WireMessage):
    """Number of rollouts dropped for one reason. A newer hub may send reasons that this node does not know."""

    reason: Name
    rollouts: Count


class Totals(WireMessage):
    """Totals of the node's key in this run, from the hub's database, with its place on the leaderboard.

    Sent soon after Welcome, and again at changes, to nodes whose Proof sets `hears_totals`.
    """

    type: Literal["totals"] = "totals"
    trained_rollouts: Count
    trained_tokens: Count
    """Tokens drawn by this node, without prefixes that other nodes drew."""
    evaluated_rollouts: Count
    answered_rollouts: Count = 0
    """Rollouts delivered to tenants (users of the hub's API)."""
    answered_tokens: Count = 0
    """Tokens of these rollouts that this node drew."""
    dropped: Annotated[tuple[DroppedCount, ...], Field(max_length=64, strict=False)] = ()
    others_checked: Count = 0
    """Checks of other nodes' rollouts that this node made and whose result the hub confirmed."""
    share: Annotated[float, Field(ge=0, le=1)]
    """Fraction of all rollouts that the run trained on, evaluated or delivered to tenants."""
    rank: Annotated[int, Field(ge=1, le=2**53)] | None
    """Rank by share, largest first; None = none of the node's rollouts was used yet."""
    num_ranked: Count
    """Number of nodes that the leaderboard ranks."""
    page: Annotated[str, Field(max_length=256, pattern=r"^/[!-~]*$")]
    """Path of the node's page on the hub."""
