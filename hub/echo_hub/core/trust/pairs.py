"""Comparison of two nodes' findings about one rollout, for runs in which nodes check each other.

Neither node is exact: both round as engines of their numerics classes do. For each token, two honest nodes report the
same log-probability and the same lower end of the interval of cumulative probability that draws the token, up to noise.
The noise in log-odds has the sum of both nodes' scales. So `likelihood.claim_curves` takes one finding as claim, the
other as truth.
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
"""Lower bound of compared log-probabilities, in nats. For tokens that no honest node samples, honest engines compute
very different logarithms."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerFinding:
    """What one checking node computed about a rollout that other nodes sampled."""

    spans: tuple[tuple[str, Evidence], ...]
    """Pairs of node and evidence: one for each node that sampled a part of the rollout, in token order."""
    below: NDArray[np.float64]
    """[T] lower ends of the intervals of cumulative probability that draw the tokens."""
    logprobs: NDArray[np.float64]
    """[T] log-probabilities of the tokens that the checking node computed, in nats."""
    num_tokens: int
    """Number of tokens that the checker computed, prompt included."""
    warmth: float = 1.0
    """Temperature of the draws, divided by the run's."""
    is_greedy: bool = False
    """True for greedy choices. `below` then has each token's log-probability gap to the likeliest token at the run's
    temperature, in nats."""


def apart(one: PeerFinding, other: PeerFinding) -> Evidence:
    """Return the differences of two findings about one rollout as evidence that one of them is wrong: two differences
    per token, of the interval's lower end and of the log-probability. Greedy choices have one: of their gap to the
    likeliest token."""
    if one.is_greedy:
        gaps = (np.minimum(finding.below, -FLOOR) for finding in (one, other))
        return Evidence.of_differences(np.subtract(*gaps))
    edges = bounded_log_odds(one.below) - bounded_log_odds(other.below)
    likely = (log_odds(np.maximum(finding.logprobs, FLOOR)) for finding in (one, other))
    return Evidence.of_differences(one.warmth * np.concatenate([edges, np.subtract(*likely)]))


def contradiction(one: PeerFinding, other: PeerFinding, honest: Honest) -> float:
    """Return the evidence, in nats, that not both findings are honest. `honest`: rounding scales of both nodes' classes
    together. `weigh` divides by `CLAIMS_DISPERSION` to allow for tokens that repeat within a group. One rollout has no
    repeated tokens, so the division is undone here."""
    return CLAIMS_DISPERSION * max(weigh(apart(one, other), honest))
