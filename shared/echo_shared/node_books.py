"""What the hub's books say of one node: what became of its rollouts, what checks found, and what was decided of it.

They are here because the pages import nothing of the hub. Fields are those of the JSON of /api/v1/nodes/ID: a name is a
promise. Times are seconds since the epoch on the hub's clock, log-probabilities and log-odds are nats.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_shared.books import NodeTotals
from echo_shared.rollout_books import RolloutSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutcome:
    """What became of some of a node's rollouts, all of them final."""

    outcome: str
    """trained, evaluated, or the `DropReason` value for which they were dropped."""
    rollouts: int
    received: int
    """Those of them that came in."""
    tokens: int
    """That the node drew, in rollouts which others began or ended too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClass:
    """Tokens by how far off they were."""

    edge: float | None
    """No more than this, nats, and more than the edge of the class before; None: more than any edge."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckEvidence:
    """What computing a node's tokens again has shown: `echo_hub.core.trust.evidence` says what is counted."""

    draws: tuple[TokenClass, ...]
    """By how far the draw lay outside the claimed token's interval, in log-odds. An honest node's are in the first
    classes."""
    claims: tuple[TokenClass, ...]
    """By how much the claimed log-odds were off."""
    mismatch_kl: float
    """Mean over the tokens of the k3 estimate of KL(behaviour ‖ truth), nats."""
    bias: float | None
    """Mean over the claims of the true less the claimed log-odds, nats; None: nothing was claimed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustDecision:
    """One line of the log of decisions."""

    number: int
    decided_at: float
    decision: str
    """quarantined, released (by the hub itself) or pardoned (by the operator)."""
    reason: str
    rollout_id: str
    """Which led to it; empty = none."""
    evidence: CheckEvidence | None
    """What that showed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """All that the books have of one node. Of what there may be much, the newest first, and not all."""

    totals: NodeTotals
    public_key: str
    """Ed25519, in hexadecimal digits; empty = it never joined."""
    outcomes: tuple[NodeOutcome, ...]
    """The most rollouts first."""
    shown: CheckEvidence | None
    """What its checks have shown since its standing began last; None: nothing that counts."""
    decisions: tuple[TrustDecision, ...]
    checked: tuple[RolloutSummary, ...]
    """Rollouts that were checked."""
    rollouts: tuple[RolloutSummary, ...]
    """Rollouts that were leased to it."""
