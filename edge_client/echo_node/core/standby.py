"""Sentences that tell the user why the hub gives this node no work (the node is on standby)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from echo_shared.wire.messages import Standby, StandbyReason

SENTENCES: Final[Mapping[StandbyReason, str]] = {
    StandbyReason.CHEAPER_NODES_SUFFICE: "Standing by: cheaper nodes do all the work. This node stays ready, and "
    "steps in when they no longer suffice.",
    StandbyReason.SPEND_CAP: "Standing by: this node costs more than the hub may still spend in an hour.",
    StandbyReason.TOO_SLOW: "Standing by: this machine's rollouts arrive too late for training. The hub sends a "
    "rollout now and then, to measure the pace again.",
    StandbyReason.NO_WORK_NOW: "No work at this moment: the rollouts for the next training steps are all handed out "
    "or drawn. The hub first asks the nodes that waited longest.",
    StandbyReason.FAILING: "Resting for a while: this node returned work to the hub, or sent unusable rollouts.",
    StandbyReason.QUARANTINED: "In quarantine: this node's rollouts differ from the policy's own, so the hub gives "
    "it no work and drops its rollouts. Update echo-node and run `echo-node doctor`. "
    "Faulty memory, an overclocked GPU or a damaged model can cause this. Then ask the "
    "hub's operator for a pardon, and give this node's id.",
}
"""Sentence for the user, by reason."""

WORKS_AGAIN: Final = "The hub has work for this node again."


def sentence(news: Standby) -> str:
    """Return the sentence for the reason, with the hub's detail.

    If the reason is NO_WORK_NOW, return only the detail, for example "the run is finished".
    """
    if news.reason is None:
        return WORKS_AGAIN
    if news.reason is StandbyReason.NO_WORK_NOW and news.detail:
        return news.detail
    return f"{SENTENCES[news.reason]} {news.detail}".strip()
