"""Records of one node in the hub's database: its rollouts' outcomes, check results and trust decisions.

The pages use these classes without importing the hub. Field names are those of the JSON of /api/v1/nodes/ID, so
renaming one breaks clients. Times are seconds since the epoch on the hub's clock; log-probabilities and log-odds are in
nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo_shared.records.rollout import RolloutSummary
from echo_shared.records.run import NodeTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutcome:
    """Count of a node's final rollouts with one outcome."""

    outcome: str
    """trained, evaluated, or a `DropReason` value."""
    rollouts: int
    received: int
    """Number of rollouts with this outcome that arrived at the hub."""
    tokens: int
    """Tokens drawn by this node, including its parts of rollouts shared with other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClass:
    """One bin of a histogram. The histogram counts a node's tokens by how far the node's claim differs from the
    recomputed value.
    """

    edge: float | None
    """Upper edge of the bin in nats; the previous bin's edge is the lower one. None: no upper edge."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckEvidence:
    """Results of recomputing a node's tokens; `echo_hub.core.trust.evidence` defines what is counted."""

    draws: tuple[TokenClass, ...]
    """Histogram of tokens by how far the random number of the draw lies outside the interval of cumulative probability
    that draws the token, in nats of log-odds. An honest node's tokens are in the first bins.
    """
    claims: tuple[TokenClass, ...]
    """Histogram of tokens by the error of the log-odds that the node claimed for them, in nats."""
    mismatch_kl: float
    """Mean over tokens of the k3 estimate of KL(claimed ‖ recomputed), in nats."""
    bias: float | None
    """Mean over tokens of recomputed minus claimed log-odds, in nats; None: the node claimed none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustDecision:
    """Log entry of one trust decision."""

    number: int
    decided_at: float
    decision: str
    """quarantined, released (by the hub) or pardoned (by the operator)."""
    reason: str
    rollout_id: str
    """Rollout that led to the decision; empty: none."""
    evidence: CheckEvidence | None
    """Evidence from the check of the rollout `rollout_id`; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMismatch:
    """Difference between a node's log-probabilities and the learner's, over the node's rollouts in the newest steps."""

    node_id: str
    kl: float
    """Mean estimate of KL(claimed ‖ learner) per token, in nats."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustStatus:
    """Results of all checks of nodes' rollouts. Counts are since the hub's start, except those with "now"."""

    checks: Mapping[str, int] = field(default_factory=dict)
    """Number of verdicts by numerics class (backend/precision/device). A check gives one verdict for each node that
    drew a part of the rollout.
    """
    failed_checks: Mapping[str, int] = field(default_factory=dict)
    """Number of verdicts that went against the node, by numerics class."""
    abandoned_checks: int = 0
    """Checks that the verifier could not complete."""
    waiting_checks: int = 0
    """Number of rollouts whose check is not finished now."""
    quarantined: int = 0
    """Number of nodes in quarantine now; they get no work."""
    checkers: int = 0
    """Number of connected nodes now that offer to check other nodes' rollouts."""
    opinions: int = 0
    """Number of check results that nodes reported about other nodes' rollouts (findings). Several findings about one
    rollout count each.
    """
    disagreements: int = 0
    """Number of rollouts whose first two findings contradict each other."""
    outvoted: int = 0
    """Number of findings that two other findings contradict."""
    checked_tokens: int = 0
    """Tokens that nodes recomputed for checks, prompts included."""
    mismatch: tuple[NodeMismatch, ...] = ()
    """Nodes with the largest mismatch with the learner, the largest first."""
    lagging: tuple[tuple[str, str], ...] = ()
    """(node, reason) for each node that probably draws with an older policy version than it claims."""
    suspended: tuple[str, ...] = ()
    """Policy versions and groups for which the checks of many nodes of one numerics class (backend, precision, device)
    fail. These checks count against no node.
    """
    coarser: tuple[str, ...] = ()
    """Numerics classes (backend, precision, device) whose nodes round more coarsely than the hub measured itself, with
    the scale of each class's rounding.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """All records of one node. Long lists hold only the newest entries, newest first."""

    totals: NodeTotals
    public_key: str
    """The node's Ed25519 public key, hexadecimal; empty = the node never joined."""
    outcomes: tuple[NodeOutcome, ...]
    """Counts of the node's rollouts by outcome, the largest number of rollouts first."""
    shown: CheckEvidence | None
    """Results of the checks that led to the hub's present verdict on the node; None: no check yet."""
    decisions: tuple[TrustDecision, ...]
    checked: tuple[RolloutSummary, ...]
    """Rollouts of the node that the hub checked."""
    rollouts: tuple[RolloutSummary, ...]
    """Rollouts leased to the node."""
