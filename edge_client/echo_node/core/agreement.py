"""What this node knows of a rollout beside what the hub says of it: whether the two agree, and if not, what to do.

The hub is ahead of a node that was away: that is in order, and ends by itself. The node is never ahead of the hub,
which commits first and tells then; and what is final on both is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from echo_shared.messages import Checked, Receipt

_RANK: Final = {"leased": 0, "sent": 1, "received": 2, "scored": 3, "trained": 4, "evaluated": 4, "dropped": 4}
_FINAL: Final = 4
_HEARS: Final = "The node hears of it when it connects: echo-node run"
_TELL: Final = (
    "Tell the hub's operator, with this rollout's id: its books may have been put back to an older state, or somebody"
    " has changed them."
)


class Agreement(StrEnum):
    """Stable, for programs that read `echo-node receipts --json`."""

    SAME = "same"
    ON_ITS_WAY = "on_its_way"
    """Finished here, and not yet there."""
    HUB_AHEAD = "hub_ahead"
    """The hub has news that this node has not heard."""
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`sentence` says what it means and what to do; empty where both say the same."""

    agreement: Agreement
    sentence: str = ""


def compare(state: str, drop_reason: str | None, checked: str, hubs: Receipt) -> Comparison:
    """`state`, `drop_reason` and `checked` are as the node's spool has them."""
    mine, theirs = _RANK[state], _RANK[hubs.state]
    is_same = (state, drop_reason) == (hubs.state.value, hubs.drop_reason and hubs.drop_reason.value)
    known, found = Checked(checked), hubs.checked
    if known is not Checked.NO and found is not known:
        here, there = known.value, found.value
        return _different(f"Checked: {here} here, {there} on the hub, which never takes that back.")
    if is_same:
        if found is known:
            return Comparison(Agreement.SAME)
        return Comparison(Agreement.HUB_AHEAD, f"The hub has checked it: {found.value}. {_HEARS}")
    if state == "sent" and hubs.state.value == "leased":
        return Comparison(
            Agreement.ON_ITS_WAY, "It is finished here, and not on the hub yet: the node sends it once it is connected."
        )
    if mine == _FINAL:
        return _different("It was final here, and what is final never changes.")
    if theirs > mine:
        return Comparison(Agreement.HUB_AHEAD, f"The hub has gone on with it. {_HEARS}")
    return _different("The hub has said more before than it says now.")


def _different(what: str) -> Comparison:
    return Comparison(Agreement.DIFFERENT, f"{what} {_TELL}")
