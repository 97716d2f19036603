"""What a node and its operator, the hub's operator and the books are told of why it is judged so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, assert_never

from echo_hub.core.trust.evidence import CLAIM_EDGES, DRAW_EDGES
from echo_hub.core.trust.judging import Alternative, against
from echo_hub.core.trust.standing import Grounds, Standing

BY_OPERATOR: Final = "By the operator."
CHANGED: Final = "Its engine is another than before."
OUTVOTED: Final = "As a checker it has contradicted two others, who agree with each other."
DISPROVED: Final = "Who has found that it draws as leased is contradicted by two others."
CLASS_WIDE: Final = "Unlike nodes of {numerics} all round more than expected: numerics of that engine, not forgery."
DOUBTFUL: Final = "A checker finds that it was not drawn as leased, and no second one could say whether that is so."

_WRONG: Final[Mapping[Alternative, str]] = {
    Alternative.DRAWS_FORGED: "Its tokens do not follow from the lease's seed and the named version",
    Alternative.CLAIMS_INVENTED: "Its log-probabilities are not those of the named version",
    Alternative.CLAIMS_TOO_LOW: "Its log-probabilities are all too low",
    Alternative.CLAIMS_TOO_HIGH: "Its log-probabilities are all too high",
    Alternative.COARSER_THAN_SAID: "Its engine computes in fewer bits than it says",
    Alternative.SHOPPED: "Where rounding allows either of two tokens, it returns the one that earns more",
}


def convicting(standing: Standing) -> Grounds:
    """Return what the sum consists of that weighs most against the node."""
    return standing.grounds[standing.sums.index(max(standing.sums))]


def what_is_wrong(standing: Standing) -> str:
    """Return what the test says, and what shows it, of all that was checked since that sum was zero."""
    nats, alternative = against(standing.sums)
    grounds = convicting(standing)
    if not grounds.num_rollouts:
        return f"{_WRONG[alternative]}: {nats:.1f} nats of evidence from before the hub's start."
    checked = _counted(grounds.num_rollouts, "checked rollout")
    before = ", and some before the hub's start" if grounds.is_partial else ""
    return f"{_WRONG[alternative]}: {nats:.1f} nats of evidence from {checked}{before}. {_shown(grounds, alternative)}"


def _shown(grounds: Grounds, alternative: Alternative) -> str:
    """The tokens that speak for the alternative: the largest classes of distance that have any."""
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
    """How many tokens lie beyond each of the farthest edges that any lies beyond, two at most."""
    beyond = [(edge, sum(counts[place + 1 :])) for place, edge in enumerate(edges)]
    told = [f" by more than {edge:g} nats: {count}" for edge, count in beyond if count][-2:]
    return ",".join(told) or f" by more than {edges[0]:g} nats: 0"


def why_not(standing: Standing | None, *, is_trusted: bool) -> str:
    """Why the operator cannot take a node for proven, or have it prove itself anew; empty: it can be done."""
    if standing is None:
        return "It is not here, and nothing was ever found of it."
    if standing.is_quarantined:
        return "It is in quarantine; a pardon lets it begin anew."
    if is_trusted and standing.is_proven:
        return "It is proven already."
    if not is_trusted and not standing.is_proven:
        return "It has yet to prove itself in any case."
    return ""


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
