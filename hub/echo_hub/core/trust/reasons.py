"""What a node and its operator, the hub's operator and the books are told of why it is judged so."""

from __future__ import annotations

from typing import Final

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import WEIGHTS
from echo_hub.core.trust.standing import Standing

BY_OPERATOR: Final = "By the operator."
CHANGED: Final = "Its engine is another than before."
OUTVOTED: Final = "As a checker it has contradicted two others, who agree with each other."
DISPROVED: Final = "Who has found that it draws as leased is contradicted by two others."
DOUBTFUL: Final = "A checker finds that it was not drawn as leased, and no second one could say whether that is so."


def not_drawn(evidence: Evidence, policy_version: int) -> str:
    outside, apart = sum(evidence.draws[3:]), sum(evidence.claims[3:])
    return (
        f"Of {_counted(evidence.num_tokens, 'token')}, not what version {policy_version} draws from the lease's seed: "
        f"{outside}; claimed with another log-probability than it gives: {apart}."
    )


def what_is_wrong(standing: Standing, evidence: Evidence) -> str:
    """The newest evidence, and what the test says of all of it."""
    sums = standing.sums
    by_draws = max(sums[: len(WEIGHTS)]) >= max(sums[len(WEIGHTS) :])
    what = "Its tokens are not drawn as leased" if by_draws else "Its log-probabilities are not its policy's"
    if max(sums) in sums[-2:]:
        what += f", but all too {'low' if sums[-2] > sums[-1] else 'high'}"
    outside, apart = sum(evidence.draws[3:]), sum(evidence.claims[3:])
    checked, tokens = _counted(standing.num_checked, "checked rollout"), _counted(evidence.num_tokens, "token")
    return (
        f"{what}: {max(sums):.1f} nats against it after {checked}; of the last one's {tokens} {outside} lie far "
        f"outside the draw, and {apart} claims are far off."
    )


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
