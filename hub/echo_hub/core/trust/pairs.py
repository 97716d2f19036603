"""Comparison of what two nodes find of one rollout, where nodes check each other.

Neither of the two is exact: both round as their classes do. Where each token's interval begins, and how likely the
token is, two honest ones say the same up to noise in log-odds whose scale is the sum of their scales. That is the
question of `likelihood.claim_curves`, asked of one finding as the claim and of the other as the truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.trust.evidence import Evidence, log_odds
from echo_hub.core.trust.judging import CLAIMS_DISPERSION, weigh
from echo_hub.core.trust.likelihood import bounded_log_odds
from echo_hub.core.trust.numerics import Honest

FLOOR: Final = -7.0
"""Nats. Of tokens that both find less likely than this, neither need know how unlikely they are: where nobody would
have drawn a token, the logarithms of honest engines lie far apart."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finding:
    """What one node has found of a rollout that others drew."""

    spans: tuple[tuple[str, Evidence], ...]
    """What it shows of each node that drew a part, in order."""
    below: NDArray[np.float64]
    """[T], where each token's interval begins, in cumulative probability."""
    logprobs: NDArray[np.float64]
    """[T], nats."""
    num_tokens: int
    """That it was fed, the prompt's too."""


def apart(one: Finding, other: Finding) -> Evidence:
    """How far two findings of one rollout lie apart, as evidence against either: two claims a token."""
    edges = bounded_log_odds(one.below) - bounded_log_odds(other.below)
    likely = (log_odds(np.maximum(finding.logprobs, FLOOR)) for finding in (one, other))
    return Evidence.of_differences(np.concatenate([edges, np.subtract(*likely)]))


def contradiction(one: Finding, other: Finding, honest: Honest) -> float:
    """Nats that speak against two findings being honest; `honest`: the scales of both together. Of one rollout no token
    is like another, so what weights are divided by for groups is multiplied back."""
    return CLAIMS_DISPERSION * max(weigh(apart(one, other), honest))
