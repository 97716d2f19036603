"""What a node and its operator, the hub's operator and the books are told of why it is judged so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import Alternative, against
from echo_hub.core.trust.standing import Standing

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
}


def not_drawn(evidence: Evidence, policy_version: int) -> str:
    outside, apart = sum(evidence.draws[3:]), sum(evidence.claims[3:])
    return (
        f"Of {_counted(evidence.num_tokens, 'token')}, not what version {policy_version} draws from the lease's seed: "
        f"{outside}; claimed with another log-probability than it gives: {apart}."
    )


def what_is_wrong(standing: Standing) -> str:
    """What the test says of all checks together."""
    nats, alternative = against(standing.sums)
    checked = _counted(standing.num_checked, "checked rollout")
    return f"{_WRONG[alternative]}: {nats:.1f} nats of evidence, {checked}."


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
