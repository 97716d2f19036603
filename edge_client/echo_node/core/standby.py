"""What a node without work tells its user, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from echo_shared.messages import Standby, StandbyReason

SENTENCES: Final[Mapping[StandbyReason, str]] = {
    StandbyReason.CHEAPER_NODES_SUFFICE: "Standing by: cheaper nodes do all the work that there is. This one stays "
    "ready, and steps in when they no longer suffice.",
    StandbyReason.SPEND_CAP: "Standing by: this node costs more than the hub may still spend in an hour.",
    StandbyReason.TOO_SLOW: "Standing by: what this machine returns comes too late to be trained on. It is given a "
    "rollout now and then, so that its pace is measured again.",
    StandbyReason.NO_WORK_NOW: "No work at this moment: other nodes have all that there is. Those that waited longest "
    "are asked first.",
    StandbyReason.FAILING: "Resting for a while: the hub was given work back by this node, or sent what it could not "
    "use.",
    StandbyReason.QUARANTINED: "In quarantine: what this node returned is not what the policy draws that it was asked "
    "for, so the hub gives it no work and drops what it has of it. Update echo-node, let `echo-node doctor` look at "
    "this machine (memory that errs, an overclocked GPU and a damaged model do this), then ask the hub's operator for "
    "a pardon and name this node's id.",
}
"""A test holds it equal to StandbyReason."""

WORKS_AGAIN: Final = "The hub has work for this node again."


def sentence(news: Standby) -> str:
    """The reason, then the hub's own words; those alone where they say why nobody has work, such as that the run is
    finished."""
    if news.reason is None:
        return WORKS_AGAIN
    if news.reason is StandbyReason.NO_WORK_NOW and news.detail:
        return news.detail
    return f"{SENTENCES[news.reason]} {news.detail}".strip()
