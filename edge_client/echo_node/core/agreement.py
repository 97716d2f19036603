"""Compares a rollout's state on this node with its state on the hub.

The hub commits a state before it sends the receipt, so the node is never ahead of the hub. The hub may be ahead of the
node, after an offline time, until the next receipts arrive. Once a state is final, it is the same on both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from echo_shared.wire.messages import Checked, Receipt, ReceiptState

_RANK: Final = {
    "leased": 0,
    "sent": 1,
    "received": 2,
    "scored": 3,
    "trained": 4,
    "evaluated": 4,
    "answered": 4,
    "dropped": 4,
}
_FINAL: Final = 4
_HEARS: Final = "The node receives the news when it connects: echo-node run"
_TELL: Final = (
    "Tell the hub's operator, with this rollout's id: the hub's database may have been restored to an older state or "
    "changed by hand."
)


class Agreement(StrEnum):
    """Result of comparing a rollout's states on node and hub. The values are stable, for programs that read
    `echo-node receipts --json`.
    """

    SAME = "same"
    ON_ITS_WAY = "on_its_way"
    """The node has finished the rollout; the hub has not received it."""
    HUB_AHEAD = "hub_ahead"
    """The hub has a newer state than this node."""
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class RecordsComparison:
    """Result of a comparison. `sentence` says what the result means and what to do; empty if both agree."""

    agreement: Agreement
    sentence: str = ""


def compare(state: str, drop_reason: str | None, checked: str, hubs: Receipt) -> RecordsComparison:
    """Compare the hub's receipt with `state`, `drop_reason` and `checked` from the node's spool (store of rollouts)."""
    mine, theirs = _RANK[state], _RANK[hubs.state]
    if state == "evaluated" and theirs == _FINAL and hubs.state is ReceiptState.ANSWERED:
        # To older releases of the node, the hub reports answered rollouts as EVALUATED.
        state = ReceiptState.ANSWERED.value
    is_same = (state, drop_reason) == (hubs.state.value, hubs.drop_reason and hubs.drop_reason.value)
    known, found = Checked(checked), hubs.checked
    if known is not Checked.NO and found is not known:
        here, there = known.value, found.value
        return _different(f"Checked: {here} here, {there} on the hub. The hub never revokes a check.")
    if is_same:
        if found is known:
            return RecordsComparison(Agreement.SAME)
        return RecordsComparison(Agreement.HUB_AHEAD, f"The hub has checked it: {found.value}. {_HEARS}")
    if state == "sent" and hubs.state.value == "leased":
        return RecordsComparison(
            Agreement.ON_ITS_WAY, "It is finished here, but not on the hub: the node sends it once it is connected."
        )
    if mine == _FINAL:
        return _different("It was final here, and a final state never changes.")
    if theirs > mine:
        return RecordsComparison(Agreement.HUB_AHEAD, f"The hub has a newer state. {_HEARS}")
    return _different("The hub's state was newer before than it is now.")


def _different(what: str) -> RecordsComparison:
    return RecordsComparison(Agreement.DIFFERENT, f"{what} {_TELL}")
