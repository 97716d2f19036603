"""Reasons of verdicts, for the node, its owner, the hub's operator and the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, assert_never

from echo_hub.core.trust.evidence import CLAIM_EDGES, DRAW_EDGES
from echo_hub.core.trust.judging import Alternative, against
from echo_hub.core.trust.standing import Grounds, Standing

BY_OPERATOR: Final = "By the operator."
CHANGED: Final = "Its engine has changed."
OUTVOTED: Final = "As a checker it contradicted two other nodes that agree with each other."
DISPROVED: Final = "Two nodes contradict the checker that found its rollout honest."
CLASS_WIDE: Final = (
    "Several nodes of {numerics} without a common owner round more than expected. So the cause is that engine, not "
    "forgery."
)
UNTRAINABLE: Final = "The learner could not train on one of its rollouts."
DOUBTFUL: Final = "A checker found that the rollout was not drawn as leased, and no second node could check that."

_WRONG: Final[Mapping[Alternative, str]] = {
    Alternative.DRAWS_FORGED: "Its tokens do not follow from the lease's seed and the named version",
    Alternative.CLAIMS_INVENTED: "Its log-probabilities are not those of the named version",
    Alternative.CLAIMS_TOO_LOW: "Its log-probabilities are all too low",
    Alternative.CLAIMS_TOO_HIGH: "Its log-probabilities are all too high",
    Alternative.COARSER_THAN_SAID: "Its engine computes in fewer bits than it says",
    Alternative.SHOPPED: "Where rounding allows either of two tokens, it returns the one that earns more",
}


def convicting(standing: Standing) -> Grounds:
    """Return the checks of the kind with the most evidence against the node: evidence is summed for each kind."""
    return standing.grounds[standing.sums.index(max(standing.sums))]


def what_is_wrong(standing: Standing) -> str:
    """Return in words what the node did wrong. Its largest sum of evidence says what; the text also names how many
    rollouts were checked since that sum was last zero."""
    nats, alternative = against(standing.sums)
    grounds = convicting(standing)
    if not grounds.num_rollouts:
        return f"{_WRONG[alternative]}: {nats:.1f} nats of evidence from before the hub's start."
    checked = _counted(grounds.num_rollouts, "checked rollout")
    before = ", and some before the hub's start" if grounds.is_partial else ""
    return f"{_WRONG[alternative]}: {nats:.1f} nats of evidence from {checked}{before}. {_shown(grounds, alternative)}"


def _shown(grounds: Grounds, alternative: Alternative) -> str:
    """Return in words what the evidence shows for the alternative: how many tokens err by more than the limits (edges)
    of the two highest non-empty error classes, or the mean error."""
    shown = grounds.shown
    match alternative:
        case Alternative.DRAWS_FORGED | Alternative.SHOPPED:
            found = _beyond(shown.draws, DRAW_EDGES)
            return f"Of {_counted(shown.num_tokens, 'token')}, outside the interval of their draw{found}."
        case Alternative.CLAIMS_TOO_LOW | Alternative.CLAIMS_TOO_HIGH:
            mean = shown.bias / shown.num_claims if shown.num_claims else 0.0
            return f"Over {_counted(shown.num_claims, 'token')} the true log-odds are {mean:+.2g} nats off on average."
        case Alternative.CLAIMS_INVENTED | Alternative.COARSER_THAN_SAID:
            found = _beyond(shown.claims, CLAIM_EDGES)
            return f"Of {_counted(shown.num_claims, 'token')}, claimed with other log-odds than the true ones{found}."
        case _:
            assert_never(alternative)


def _beyond(counts: Sequence[int], edges: Sequence[float]) -> str:
    """Return in words how many tokens err by more than an edge, for the two largest edges that any token exceeds."""
    beyond = [(edge, sum(counts[place + 1 :])) for place, edge in enumerate(edges)]
    told = [f" by more than {edge:g} nats: {count}" for edge, count in beyond if count][-2:]
    return ",".join(told) or f" by more than {edges[0]:g} nats: 0"


def why_not(standing: Standing | None, *, is_trusted: bool) -> str:
    """Return why the operator cannot set this node to proven (`is_trusted`) or back to new; empty if the operator
    can.
    """
    if standing is None:
        return "This node is not connected, and was never checked."
    if standing.is_quarantined:
        return "This node is in quarantine; pardon it first."
    if is_trusted and standing.is_proven:
        return "This node is proven already."
    if not is_trusted and not standing.is_proven:
        return "This node is not proven, so it must prove itself in any case."
    return ""


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
