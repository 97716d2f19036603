"""The tokens that the hub knows of one unfinished rollout (see `echo_hub.intake.partials`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_shared.sampling.version_spans import Spans, between
from echo_shared.wire.messages import Rollout

ROLLOUT_BYTES: Final = 512
"""Estimated memory of one rollout in bytes, without its tokens. It includes the rollout's share of its lease."""
SPAN_BYTES: Final = 256
"""Estimated memory of each policy version after the first in a rollout, in bytes."""

Drawers = tuple[tuple[str, int], ...]
"""The nodes that drew a rollout, each with its number of tokens, in token order."""


@dataclass(frozen=True, slots=True)
class Origin:
    lease_id: int
    """The earlier lease whose tokens this rollout continues."""
    drawn_by: Drawers


@dataclass(slots=True)
class PartialRollout:
    """Known tokens of one rollout. Ids and log-probabilities are little-endian bytes, which grow in place."""

    ids: bytearray
    logprobs: bytearray
    versions: Spans = ()
    given: tuple[int, ...] | None = ()
    """Lengths of the prefixes sent with the lease, 0 = no prefix; several if the lease was sent again. None if the hub
    does not know them."""
    origin: Origin | None = None
    """Lease and nodes from which the first given prefix came."""
    others_held: bool = False
    """True if the hub does not know the given prefix and another node may have drawn it."""
    is_open: bool = True
    """True while the node that holds the rollout may send more tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4

    @property
    def is_whole(self) -> bool:
        """True if the hub knows every token of the rollout so far, and the node that drew each token."""
        return self.given is not None and len(self.given) == 1 and not self.others_held

    @property
    def num_bytes(self) -> int:
        return ROLLOUT_BYTES + 8 * self.num_tokens + SPAN_BYTES * max(0, len(self.versions) - 1)

    def drawers(self, node_id: str, num_tokens: int, *, num_given: int) -> Drawers:
        """Return the nodes that drew the first `num_tokens` tokens, each with its number of tokens. Assume that
        `node_id` drew all tokens after the first `num_given`."""
        before = self.origin.drawn_by if self.origin is not None and num_given else ()
        own = num_tokens - sum(count for _, count in before)
        if own == 0:
            return before
        if before and before[-1][0] == node_id:
            return (*before[:-1], (node_id, before[-1][1] + own))
        return (*before, (node_id, own))

    def problem(self, rollout: Rollout, versions: Spans, oldest: int) -> str:
        """Return in words how the finished rollout contradicts what the hub knows of it; "" if it does not. `oldest`:
        oldest version that the node may have used for its own tokens."""
        if self.given is None:
            return ""
        count = rollout.num_given
        if count not in self.given:
            return f"{count} given tokens instead of {' or '.join(map(str, self.given))}"
        if (count or self.ids) and (wrong := self._beginning_problem(rollout, versions)):
            return wrong
        own = between(versions, count, len(rollout.completion_ids))
        if own and own[0].policy_version < oldest:
            return f"drawn by version {own[0].policy_version}, leased by {oldest}"
        return ""

    def _beginning_problem(self, rollout: Rollout, versions: Spans) -> str:
        """Compare the finished rollout with the given prefix and with the parts received before. Return the
        contradiction; "" if there is none."""
        count = rollout.num_given
        if rollout.completion_ids[:count].astype("<i4").tobytes() != self.ids[: 4 * count]:
            return "other tokens than were given"
        if rollout.behavior_logprobs[:count].astype("<f4").tobytes() != self.logprobs[: 4 * count]:
            return "other log-probabilities than were given"
        if between(versions, 0, count) != between(self.versions, 0, count):
            return "other versions than were given"
        if rollout.completion_ids[: self.num_tokens].astype("<i4").tobytes() != self.ids:
            return "other tokens than were streamed"
        if rollout.behavior_logprobs[: self.num_tokens].astype("<f4").tobytes() != self.logprobs:
            return "other log-probabilities than were streamed"
        return ""
