"""Rollouts that a node has drawn: finished completions, and new tokens of unfinished ones."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from echo_shared.wire.messages.base import MAX_GROUP_SIZE, WireMessage
from echo_shared.wire.messages.fields import MAX_TOKENS, Count, Lax, Logprobs, PolicyVersion, RolloutId, TokenIds

MAX_PARTS_TOKENS: Final = 65_536
"""Maximum tokens in all parts of one message: half a megabyte, so that it does not block a slow uplink for long."""
MAX_VERSION_SPANS: Final = 64
"""Maximum number of version spans (parts drawn with one policy version) of one completion. At the limit, the node
finishes the completion with its last version.
"""


NO_ROUTE: Final = 255
"""Expert id in the route of a token whose route is unknown."""
MAX_ROUTES_BYTES: Final = 960 * 2**10
"""Maximum size of a completion's routes. With `MAX_TOKENS` tokens, they still fit into a frame from a node."""


class FinishReason(StrEnum):
    """Reason why a completion ended: STOP = a stop token was drawn (it is the last token), LENGTH = `max_tokens` was
    reached.
    """

    STOP = "stop"
    LENGTH = "length"


class VersionSpan(WireMessage):
    """Consecutive tokens of one completion that one policy version drew."""

    policy_version: PolicyVersion
    num_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]


VersionSpans = Annotated[tuple[VersionSpan, ...], Field(max_length=MAX_VERSION_SPANS, strict=False)]


@dataclass(frozen=True)
class Completion:
    """One finished completion, as its engine reports it. All other classes for a finished rollout inherit these fields.

    A new field reaches the engine's report, the node's spool, the messages, the hub's records and tables, the learner,
    the pages and the exports. Give it bounds, because any node may send it. Give it a default, because older nodes and
    spools lack it.
    """

    completion_ids: TokenIds
    """Token ids [T]. A drawn stop token is the last one."""
    behavior_logprobs: Logprobs
    """Log-probabilities [T] in nats, under the softmax at the lease's temperature, as the node reports them."""
    finish_reason: Annotated[FinishReason, Lax]
    sampling_s: Annotated[float, Field(ge=0)]
    """Seconds from the start of the prompt's prefill to the last token."""
    routes: Annotated[bytes, Field(max_length=MAX_ROUTES_BYTES)] = b""
    """Ids of the experts that computed each token in a mixture of experts, one byte each, ordered by token and then by
    layer. `NO_ROUTE` = unknown, as for the last token, which is never computed. Empty = no routes.
    """

    def content(self) -> dict[str, Any]:
        """Return this class's fields by name, without those of subclasses."""
        return dict(zip(CONTENT, content_of(self), strict=True))


CONTENT: Final = tuple(field.name for field in fields(Completion))
content_of: Final = attrgetter(*CONTENT)
"""Returns the values of the fields in CONTENT, from an object of `Completion` or a subclass, in the order of
`Completion`'s parameters.
"""


@dataclass(frozen=True, kw_only=True)
class _Leased:
    """Fields that precede the completion in a rollout's frame."""

    type: Literal["rollout"] = "rollout"
    rollout_id: RolloutId
    lease_id: Count
    group_id: Count
    index: Count
    policy_version_start: PolicyVersion
    """Version that drew the first token."""
    policy_version_end: PolicyVersion
    """Version that drew the last token."""


# The order of the bases sets the order of a frame's fields: the last base comes first. mypy cannot know that Message is
# frozen.
class Rollout(WireMessage, Completion, _Leased):  # type: ignore[misc]
    """One finished completion, with its lease and the versions that drew it."""

    num_given: Count = 0
    """Number of first tokens that came from the lease's prefix. This node drew the rest."""
    versions: VersionSpans = ()
    """Versions that drew the completion, in token order; empty = one version drew all of it."""


class RolloutPart(WireMessage):
    """New tokens of one unfinished completion, all drawn by one version; `start` is the position of the first one."""

    lease_id: Count
    index: Count
    start: Annotated[int, Field(ge=0, lt=MAX_TOKENS)]
    """Position of the first token in the completion. 0 after a reconnect: the part then repeats the completion from its
    first token, including the leased prefix.
    """
    policy_version: PolicyVersion
    ids: TokenIds
    logprobs: Logprobs
    """Log-probabilities in nats, one value per token."""


def _parts_in_bounds(parts: tuple[RolloutPart, ...]) -> tuple[RolloutPart, ...]:
    if sum(len(part.ids) for part in parts) > MAX_PARTS_TOKENS:
        raise ValueError(f"the parts of a message may have {MAX_PARTS_TOKENS} tokens in all")
    return parts


class RolloutParts(WireMessage):
    """New tokens of rollouts that the node is still drawing.

    The node does not store these messages: a reconnected node sends the tokens again, a restarted node draws them
    again.
    """

    type: Literal["rollout_parts"] = "rollout_parts"
    parts: Annotated[
        tuple[RolloutPart, ...],
        Field(min_length=1, max_length=MAX_GROUP_SIZE, strict=False),
        AfterValidator(_parts_in_bounds),
    ]


def rollout_id(lease_id: int, index: int) -> str:
    """Return the id of one leased rollout. Node, hub and leaderboard use the same id."""
    return f"{lease_id}-{index}"
