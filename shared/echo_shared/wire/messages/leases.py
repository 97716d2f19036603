"""Leases: the node's capacity, the work that the hub gives it, and messages that end a lease early."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from echo_shared.wire.messages.base import MAX_BATCHED, MAX_GROUP_SIZE, WireMessage
from echo_shared.wire.messages.checking import MAX_CHECKS
from echo_shared.wire.messages.engines import known_precision
from echo_shared.wire.messages.fields import (
    MAX_TOKENS,
    Count,
    Lax,
    Logprobs,
    PolicyVersion,
    Seed,
    Text,
    TokenIds,
    printable_line,
)
from echo_shared.wire.messages.receipts import DropReason
from echo_shared.wire.messages.rollouts import VersionSpans
from echo_shared.wire.messages.spread import ArtefactOffer

MAX_PREFIX_TOKENS: Final = 262_144
"""Maximum number of tokens in all prefixes of one lease."""


class StandbyReason(StrEnum):
    """Reason why the hub gives no work to a node that asks for it."""

    CHEAPER_NODES_SUFFICE = "cheaper_nodes_suffice"
    """The active nodes already draw enough rollouts."""
    SPEND_CAP = "spend_cap"
    """The node's price per hour exceeds what the hub may still spend."""
    TOO_SLOW = "too_slow"
    """At the node's measured speed, its rollouts would be too stale to train on."""
    NO_WORK_NOW = "no_work_now"
    """Other nodes hold all open work."""
    FAILING = "failing"
    """The node returned leases or sent invalid results, so the hub gives it no work for a while."""
    QUARANTINED = "quarantined"
    """The node's rollouts did not match their policy version. It gets no work until the operator pardons it."""


class NodeStatus(WireMessage):
    """The node's activity and capacity, sent at every change and as the heartbeat."""

    type: Literal["node_status"] = "node_status"
    activity: Literal["preparing", "waiting", "fetching", "sampling", "paused", "draining"]
    capacity: Annotated[int, Field(ge=0, le=MAX_BATCHED)]
    """Maximum number of unfinished rollouts that the node wants to hold; 0 = it wants no leases."""
    policy_version: PolicyVersion | None
    """Newest version that is verified and loaded. None while the base model is missing."""
    tokens_per_s: Annotated[float, Field(ge=0)]
    precision: Annotated[str, Field(max_length=64), AfterValidator(known_precision)] = ""
    """Precision of the engine's weights, such as f32 or q4_k_m; "" = unknown, or no engine runs."""
    checks: Annotated[int, Field(ge=0, le=MAX_CHECKS)] = 0
    """Number of checks that the node takes at a time; 0 = none, or its engine cannot check."""


class Standby(WireMessage):
    """Reason why the node gets no work. The node stays connected and receives new versions, so that it can start
    without delay.
    """

    type: Literal["standby"] = "standby"
    reason: Annotated[StandbyReason, Lax] | None
    """Reason for giving no work. None: the node may get work again."""
    detail: Text = ""
    """A sentence with numbers that explains the reason, shown to the node's user."""


class LeasedPrefix(WireMessage):
    """First tokens of one rollout, drawn by another node. The new node continues with draw number len(ids)."""

    index: Count
    ids: TokenIds
    logprobs: Logprobs
    """Log-probabilities in nats, as the earlier node reported them, one value per token."""
    versions: VersionSpans = ()
    """Versions that drew the prefix, in token order; empty = the lease's version drew all of it."""


def _prefixes_in_bounds(prefixes: tuple[LeasedPrefix, ...]) -> tuple[LeasedPrefix, ...]:
    for prefix in prefixes:
        if prefix.versions and sum(span.num_tokens for span in prefix.versions) != len(prefix.ids):
            raise ValueError("a prefix's versions must cover exactly its tokens")
    if sum(len(prefix.ids) for prefix in prefixes) > MAX_PREFIX_TOKENS:
        raise ValueError(f"the prefixes of a lease may have {MAX_PREFIX_TOKENS} tokens in all")
    return prefixes


class Lease(WireMessage):
    """Work for one node until a deadline: draw the rollouts `indices` of one group, using `seed`."""

    type: Literal["lease"] = "lease"
    lease_id: Count
    group_id: Count
    indices: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_GROUP_SIZE, strict=False)]
    prompt_ids: TokenIds
    seed: Seed
    policy_version: PolicyVersion
    """Version to draw with. If `on_new_version` is "interrupt", it is the oldest version allowed."""
    temperature: Annotated[float, Field(gt=0, le=10)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Maximum tokens of a completion, prefix included."""
    stop_ids: Annotated[tuple[Count, ...], Field(max_length=64, strict=False)]
    deadline_s: Annotated[float, Field(gt=0)]
    """Seconds from sending until the hub leases the work to another node."""
    offer: ArtefactOffer | None = None
    """Offer of the artefact with the lease's version. Set in evaluation leases, whose version may be old."""
    prefixes: Annotated[
        tuple[LeasedPrefix, ...], Field(max_length=MAX_GROUP_SIZE, strict=False), AfterValidator(_prefixes_in_bounds)
    ] = ()
    """At most one prefix per index. A rollout without a prefix starts at its first token."""
    on_new_version: Literal["finish", "interrupt"] = "finish"
    """What the node does with unfinished rollouts when a newer version arrives: "finish" completes them with the
    lease's version, "interrupt" continues them with the newer version.
    """
    returns_routes: bool = False
    """True if the rollouts should have `routes`. A node whose engine cannot record them returns none."""
    keep_keys: bool = False
    """True if a later lease may begin with this prompt and a completion: the node should keep their attention keys and
    values.
    """
    tenant: Annotated[str, Field(max_length=64), AfterValidator(printable_line)] = ""
    """Name or pseudonym of the tenant who ordered the work; empty = the run's own work."""


class LeaseRevoked(WireMessage):
    """The hub no longer wants the unfinished rollouts of this lease."""

    type: Literal["lease_revoked"] = "lease_revoked"
    lease_id: Count
    reason: Annotated[DropReason, Lax]


class LeaseReturned(WireMessage):
    """The node will not finish these rollouts of its lease. It has already sent the tokens that it drew."""

    type: Literal["lease_returned"] = "lease_returned"
    lease_id: Count
    indices: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_GROUP_SIZE, strict=False)]
    reason: Text
    unusable_version: PolicyVersion | None = None
    """Set if the reason is a policy version that the node's engine cannot use."""
