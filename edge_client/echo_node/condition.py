"""What a node does, in a word, and why, in a sentence: the first line of all that its user sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from echo_node.panel import NodeSnapshot, fetching

State = Literal[
    "connecting", "not connected", "preparing", "fetching", "sampling", "waiting", "standby", "paused", "finishing"
]


def described(snapshot: NodeSnapshot, *, is_finishing: bool) -> NodeSnapshot:
    """The snapshot with its state and the reason of that. `is_finishing`: it takes nothing new any more."""
    state, reason = _condition(snapshot, is_finishing=is_finishing)
    return replace(snapshot, state=state, reason=reason)


def _condition(snapshot: NodeSnapshot, *, is_finishing: bool) -> tuple[State, str]:
    """What matters most to the user comes first."""
    activity, held = snapshot.activity, snapshot.held_rollouts
    if activity == "draining":
        return "finishing", "What is held goes back to the hub, then the node stops."
    if is_finishing:
        return "finishing", f"The node ends the {held} rollouts that it holds, takes nothing new, then stops."
    if snapshot.holds:
        return "paused", " ".join(snapshot.holds.values())
    if not snapshot.run_name:
        return "connecting", f"Asking {snapshot.hub} to let this node in."
    if not snapshot.connected:
        return (
            "not connected",
            "The hub cannot be reached. What is finished waits here; the node tries again by itself.",
        )
    if activity == "sampling":
        return "sampling", f"Drawing {held} rollouts with policy version {snapshot.policy_version}."
    if snapshot.fetching and (activity == "fetching" or snapshot.policy_version is None):
        return "fetching", f"{'; '.join(fetching(snapshot))}."
    if snapshot.standby:
        return "standby", snapshot.standby
    if activity == "waiting":
        return "waiting", "Ready: the hub's next lease is sampled at once."
    return "preparing", "The sampling engine starts, and is measured where it was not before."
