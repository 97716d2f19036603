"""Comparison of an arrived rollout with its lease."""

from __future__ import annotations

from echo_hub.core.accounting.events import RolloutArrived
from echo_hub.core.accounting.groups import GroupOwner, LeasedRollout


def unlike_lease(event: RolloutArrived, rollout: LeasedRollout, *, owner: GroupOwner, newest: int | None) -> str:
    """Return how an arrived rollout contradicts its lease, as text for people; empty = not at all.

    `owner`: owner of the group. `newest`: newest version that a completion for the learner may have switched to; None:
    a completion must be sampled entirely with the lease's version.
    """
    first, last = event.policy_version_start, event.policy_version_end
    leased = (rollout.lease_id, rollout.group_id, rollout.index, rollout.policy_version, rollout.policy_version)
    if (event.lease_id, event.group_id, event.index, first, last) == leased:
        return event.problem
    said: dict[str, tuple[int, int]] = {
        "lease": (event.lease_id, rollout.lease_id),
        "group": (event.group_id, rollout.group_id),
        "index": (event.index, rollout.index),
    }
    mixed = ""
    if newest is None or not owner.for_learner:
        said["first policy version"] = (first, rollout.policy_version)
        said["last policy version"] = (last, rollout.policy_version)
    elif not first <= last <= max(newest, rollout.policy_version):
        mixed = f"policy versions {first} to {last}, newest published {newest}"
    wrong = [f"{name} {got} instead of {want}" for name, (got, want) in said.items() if got != want]
    return ", ".join([*wrong, *filter(None, [mixed, event.problem])])
