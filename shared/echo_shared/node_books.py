"""Records of one node in the hub's database: its rollouts' outcomes, check results and trust decisions.

The pages use these classes without importing the hub. Field names are those of the JSON of /api/v1/nodes/ID, so
renaming one breaks clients. Times are seconds since the epoch on the hub's clock; log-probabilities and log-odds are in
nats.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_shared.books import NodeTotals
from echo_shared.rollout_books import RolloutSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutcome:
    """Count of a node's final rollouts with one outcome."""

    outcome: str
    """trained, evaluated, or a `DropReason` value."""
    rollouts: int
    received: int
    """Rollouts that arrived at the hub."""
    tokens: int
    """Tokens drawn by this node, including its parts of rollouts shared with other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClass:
    """Histogram bin of tokens by deviation."""

    edge: float | None
    """Upper edge of the bin in nats; the previous bin's edge is the lower one. None: no upper edge."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckEvidence:
    """Results of recomputing a node's tokens; `echo_hub.core.trust.evidence` defines what is counted."""

    draws: tuple[TokenClass, ...]
    """Tokens by the distance of the draw from the claimed token's interval, in log-odds. An honest node's tokens fall
    into the first bins."""
    claims: tuple[TokenClass, ...]
    """Tokens by the error of the claimed log-odds."""
    mismatch_kl: float
    """Mean over tokens of the k3 estimate of KL(behavior ‖ truth), nats."""
    bias: float | None
    """Mean of true minus claimed log-odds, nats; None: no claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustDecision:
    """Log entry of one trust decision."""

    number: int
    decided_at: float
    decision: str
    """quarantined, released (by the hub) or pardoned (by the operator)."""
    reason: str
    rollout_id: str
    """Rollout that led to the decision; empty = none."""
    evidence: CheckEvidence | None
    """Evidence from that rollout's check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """All records of one node. Long lists hold only the newest entries, newest first."""

    totals: NodeTotals
    public_key: str
    """Ed25519, hexadecimal; empty = it never joined."""
    outcomes: tuple[NodeOutcome, ...]
    """Ordered by number of rollouts, largest first."""
    shown: CheckEvidence | None
    """Evidence since its current standing began; None: no evidence that counts."""
    decisions: tuple[TrustDecision, ...]
    checked: tuple[RolloutSummary, ...]
    """Rollouts that were checked."""
    rollouts: tuple[RolloutSummary, ...]
    """Rollouts leased to the node."""
