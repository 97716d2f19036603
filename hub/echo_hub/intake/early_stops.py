"""End completions of tenants' requests at a stop string, before their nodes have drawn them to the end.

Nodes do not see text, so they would draw on to max_tokens. They stream their new tokens every few seconds. As soon as
these complete a stop string, the hub takes the tokens that it knows as the result, and tells the node to stop. This
works only if the hub knows all tokens of the completion, and which nodes drew them. All other completions are cut when
their nodes return them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from echo_hub.intake.partial_rollout import PartialRollout
from echo_hub.intake.partials import Partials
from echo_hub.scoring.asked import AskedGroups, GroupBounds
from echo_shared.wire.messages import FinishReason, Rollout, RolloutPart, rollout_id


class EarlyStops:
    """Finds completions that are finished although their nodes still draw."""

    def __init__(self, partials: Partials, bounds: GroupBounds, asked: AskedGroups) -> None:
        self._partials = partials
        self._bounds = bounds
        self._asked = asked

    def ended(self, node_id: str, parts: Iterable[RolloutPart]) -> Iterator[Rollout]:
        """Yield the completions that these parts finish, in the form in which their node would return them. Pass
        `parts` to `Partials.take` first. The yielded completions still contain the tokens after the stop string."""
        for lease_id, index, start in [(part.lease_id, part.index, part.start) for part in parts]:
            found = self._partials.streamed(node_id, lease_id, index)
            if found is None:
                continue
            group_id, partial = found
            if self._asked.of(group_id) is None or not (partial.is_whole and partial.versions):
                continue
            stops = self._bounds.of(group_id).stop_strings
            ids = np.frombuffer(bytes(partial.ids), "<i4").astype(np.int32)
            if stops.may_end(ids, start) and stops.end(ids) is not None:
                yield _as_returned(lease_id, index, group_id, partial)


def _as_returned(lease_id: int, index: int, group_id: int, partial: PartialRollout) -> Rollout:
    given = partial.given
    assert given is not None, "whole"
    return Rollout(
        rollout_id=rollout_id(lease_id, index),
        lease_id=lease_id,
        group_id=group_id,
        index=index,
        policy_version_start=partial.versions[0].policy_version,
        policy_version_end=partial.versions[-1].policy_version,
        completion_ids=np.frombuffer(bytes(partial.ids), "<i4").astype(np.int32),
        behavior_logprobs=np.frombuffer(bytes(partial.logprobs), "<f4").astype(np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.0,
        num_given=given[0],
        versions=partial.versions,
    )
