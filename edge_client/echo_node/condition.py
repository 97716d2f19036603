"""A node's state in one word, and its reason in one sentence. All displays of the node begin with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from echo_node.panel import NodeSnapshot, fetching, preparing

State = Literal[
    "connecting", "not connected", "preparing", "fetching", "sampling", "waiting", "standby", "paused", "finishing"
]


def described(snapshot: NodeSnapshot, *, is_finishing: bool) -> NodeSnapshot:
    """Return the snapshot with its state and reason. `is_finishing`: True if the node accepts no new leases."""
    state, reason = _condition(snapshot, is_finishing=is_finishing)
    return replace(snapshot, state=state, reason=reason)


def _condition(snapshot: NodeSnapshot, *, is_finishing: bool) -> tuple[State, str]:
    activity, held = snapshot.activity, snapshot.held_rollouts
    if activity == "draining":
        return "finishing", "The node returns its leases to the hub, then stops."
    if is_finishing:
        return "finishing", f"The node finishes its {held} rollouts, takes no new ones, then stops."
    if snapshot.holds:
        return "paused", " ".join(snapshot.holds.values())
    if activity == "paused":
        return "paused", " ".join(said for one in snapshot.devices for said in one["holds"].values())
    if not snapshot.run_name:
        return "connecting", f"Asking {snapshot.hub} to admit this node."
    if not snapshot.connected:
        return (
            "not connected",
            "The hub cannot be reached. Finished rollouts wait here; the node retries by itself.",
        )
    if activity == "sampling":
        return "sampling", f"Drawing {held} rollouts with policy version {snapshot.policy_version}."
    if snapshot.fetching and (activity == "fetching" or snapshot.policy_version is None):
        return "fetching", f"{'; '.join(fetching(snapshot))}."
    if snapshot.standby:
        return "standby", snapshot.standby
    if activity == "waiting":
        return "waiting", "Ready: the node samples the hub's next lease at once."
    if under_way := preparing(snapshot):
        return "preparing", f"{'; '.join(under_way)}."
    return "preparing", snapshot.stage or "The sampling engine starts, and is measured the first time."
