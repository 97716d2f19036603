"""What a node has drawn: finished completions, and what is new of unfinished ones."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from echo_shared.messages.base import MAX_GROUP_SIZE, Message
from echo_shared.messages.fields import MAX_TOKENS, Count, Lax, Logprobs, PolicyVersion, RolloutId, TokenIds

MAX_PARTS_TOKENS: Final = 65_536
"""Of all parts in one message: half a megabyte, which holds up nothing else on a slow uplink for long."""
MAX_VERSION_SPANS: Final = 64
"""Of one completion: who has drawn by so many versions draws to the end by the last of them."""


class FinishReason(StrEnum):
    """Why a completion ended: it drew a stop token (kept as its last token), or reached `max_tokens`."""

    STOP = "stop"
    LENGTH = "length"


class VersionSpan(Message):
    """Tokens of one completion that one version drew, one after the other."""

    policy_version: PolicyVersion
    num_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]


VersionSpans = Annotated[tuple[VersionSpan, ...], Field(max_length=MAX_VERSION_SPANS, strict=False)]


class Rollout(Message):
    """One finished completion: its tokens, the log-probabilities it was drawn with, and the versions that drew it."""

    type: Literal["rollout"] = "rollout"
    rollout_id: RolloutId
    lease_id: Count
    group_id: Count
    index: Count
    policy_version_start: PolicyVersion
    """Of its first token."""
    policy_version_end: PolicyVersion
    """Of its last token."""
    completion_ids: TokenIds
    behavior_logprobs: Logprobs
    """Nats, under the softmax at the lease's temperature, one a completion token."""
    finish_reason: Annotated[FinishReason, Lax]
    sampling_s: Annotated[float, Field(ge=0)]
    num_given: Count = 0
    """Tokens at its beginning that the lease gave as a prefix: the others are this node's."""
    versions: VersionSpans = ()
    """Which versions drew it, in order, one after the other; empty = one drew it all."""


class RolloutPart(Message):
    """What is new of one unfinished completion: its tokens from number `start` on, all drawn by one version."""

    lease_id: Count
    index: Count
    start: Annotated[int, Field(ge=0, lt=MAX_TOKENS)]
    """0 again after a reconnect: the completion anew, a leased prefix included."""
    policy_version: PolicyVersion
    ids: TokenIds
    logprobs: Logprobs
    """Nats, one a token."""


def _parts_in_bounds(parts: tuple[RolloutPart, ...]) -> tuple[RolloutPart, ...]:
    if sum(len(part.ids) for part in parts) > MAX_PARTS_TOKENS:
        raise ValueError(f"parts may have {MAX_PARTS_TOKENS} tokens in all")
    return parts


class RolloutParts(Message):
    """What the node has drawn of rollouts that it goes on with. Never spooled: what is lost on the way is drawn again,
    or sent again after a reconnect."""

    type: Literal["rollout_parts"] = "rollout_parts"
    parts: Annotated[
        tuple[RolloutPart, ...],
        Field(min_length=1, max_length=MAX_GROUP_SIZE, strict=False),
        AfterValidator(_parts_in_bounds),
    ]


def rollout_id(lease_id: int, index: int) -> str:
    """The name of one leased rollout; the same on node, hub and leaderboard."""
    return f"{lease_id}-{index}"
