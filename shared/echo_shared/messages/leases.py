"""Which work a node is given: what it is willing to hold, leases, and what ends them early."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from echo_shared.messages.base import MAX_BATCHED, MAX_GROUP_SIZE, Message
from echo_shared.messages.checking import MAX_CHECKS
from echo_shared.messages.engines import known_precision
from echo_shared.messages.fields import (
    MAX_TOKENS,
    Count,
    Lax,
    Logprobs,
    PolicyVersion,
    Seed,
    Text,
    TokenIds,
)
from echo_shared.messages.receipts import DropReason
from echo_shared.messages.rollouts import VersionSpans
from echo_shared.messages.spread import ArtefactOffer

MAX_PREFIX_TOKENS: Final = 262_144
"""Of all prefixes of one lease."""


class StandbyReason(StrEnum):
    """Why a node that asks for work gets none."""

    CHEAPER_NODES_SUFFICE = "cheaper_nodes_suffice"
    """Those that work bring enough."""
    SPEND_CAP = "spend_cap"
    """It costs more than the hub may still spend in an hour."""
    TOO_SLOW = "too_slow"
    """At its measured pace, what it returns is too old to be trained on."""
    NO_WORK_NOW = "no_work_now"
    """Others have all that there is."""
    FAILING = "failing"
    """It gave work back, or sent what is not valid, and rests for a while."""
    QUARANTINED = "quarantined"
    """What it returned is not what its policy drew: it gets no work until the operator pardons it."""


class NodeStatus(Message):
    """What the node is doing and how much work it will hold at once. Sent on change, and as the heartbeat."""

    type: Literal["node_status"] = "node_status"
    activity: Literal["preparing", "waiting", "fetching", "sampling", "paused", "draining"]
    capacity: Annotated[int, Field(ge=0, le=MAX_BATCHED)]
    """Rollouts that the node is willing to hold, finished ones not counted; 0 = lease me nothing."""
    policy_version: PolicyVersion | None
    """Newest version that is verified and ready to sample from; None while the base is not there yet."""
    tokens_per_s: Annotated[float, Field(ge=0)]
    precision: Annotated[str, Field(max_length=64), AfterValidator(known_precision)] = ""
    """Of its engine's weights: f32, bf16, q8_0, q4_k_m ...; empty = not known, or no engine is up."""
    checks: Annotated[int, Field(ge=0, le=MAX_CHECKS)] = 0
    """Completions of others that it is willing to compute again at once; 0 = none, or its engine cannot."""


class Standby(Message):
    """Why the node gets no work; it stays connected and is sent versions, so that it can begin at once."""

    type: Literal["standby"] = "standby"
    reason: Annotated[StandbyReason, Lax] | None
    """None: it is not kept from work any more."""
    detail: Text = ""
    """A sentence with figures, for its user."""


class LeasedPrefix(Message):
    """The beginning of one rollout of a lease, which another node has drawn: it goes on with draw number len(ids)."""

    index: Count
    ids: TokenIds
    logprobs: Logprobs
    """Nats, as that node gave them, one a token."""
    versions: VersionSpans = ()
    """Which versions drew it, in order, one after the other; empty = the lease's alone."""


def _prefixes_in_bounds(prefixes: tuple[LeasedPrefix, ...]) -> tuple[LeasedPrefix, ...]:
    for prefix in prefixes:
        if prefix.versions and sum(span.num_tokens for span in prefix.versions) != len(prefix.ids):
            raise ValueError("the versions of a prefix must be of as many tokens as it has")
    if sum(len(prefix.ids) for prefix in prefixes) > MAX_PREFIX_TOKENS:
        raise ValueError(f"prefixes may have {MAX_PREFIX_TOKENS} tokens in all")
    return prefixes


class Lease(Message):
    """Work for one node until a deadline: the rollouts `indices` of one group, drawn with `seed`."""

    type: Literal["lease"] = "lease"
    lease_id: Count
    group_id: Count
    indices: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_GROUP_SIZE, strict=False)]
    prompt_ids: TokenIds
    seed: Seed
    policy_version: PolicyVersion
    """What draws it; with `on_new_version` = "interrupt", the oldest that may."""
    temperature: Annotated[float, Field(gt=0, le=10)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Of a completion, its prefix included."""
    stop_ids: Annotated[tuple[Count, ...], Field(max_length=64, strict=False)]
    deadline_s: Annotated[float, Field(gt=0)]
    """Seconds from sending until the hub leases the work elsewhere."""
    offer: ArtefactOffer | None = None
    """Of the version, where it need not be the newest: an evaluation's lease."""
    prefixes: Annotated[
        tuple[LeasedPrefix, ...], Field(max_length=MAX_GROUP_SIZE, strict=False), AfterValidator(_prefixes_in_bounds)
    ] = ()
    """At most one an index; a rollout without one begins at its first token."""
    on_new_version: Literal["finish", "interrupt"] = "finish"
    """When the node comes to hold a newer version: it draws the lease to its end by the one that it names, or goes on
    in mid-completion by the newer one."""


class LeaseRevoked(Message):
    """The hub no longer wants what is unfinished of this lease."""

    type: Literal["lease_revoked"] = "lease_revoked"
    lease_id: Count
    reason: Annotated[DropReason, Lax]


class LeaseReturned(Message):
    """The node will not finish these rollouts. What it has drawn of them has been sent before."""

    type: Literal["lease_returned"] = "lease_returned"
    lease_id: Count
    indices: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_GROUP_SIZE, strict=False)]
    reason: Text
    unusable_version: PolicyVersion | None = None
    """The policy version that its engine cannot use, if that is the reason."""
