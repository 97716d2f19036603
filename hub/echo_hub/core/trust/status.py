"""State of trust for pages and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo_hub.core.trust.mismatch import NodeMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustStatus:
    """Counts since the hub's start, except `quarantined`, the present number."""

    checked: Mapping[str, int] = field(default_factory=dict)
    """Verdicts by numerics class, one for each node that sampled a part."""
    failed: Mapping[str, int] = field(default_factory=dict)
    abandoned: int = 0
    """Checks that the verifier could not make."""
    waiting: int = 0
    """Rollouts under check."""
    quarantined: int = 0
    checkers: int = 0
    """Connected nodes that offer to check others."""
    opinions: int = 0
    """Findings of nodes about others' rollouts; several findings about one rollout count each."""
    disagreements: int = 0
    """Rollouts whose first two findings contradict each other."""
    outvoted: int = 0
    """Findings that two others contradict."""
    checked_tokens: int = 0
    """Tokens that nodes computed for checks."""
    mismatch: tuple[NodeMismatch, ...] = ()
    """Nodes with the largest mismatch with the learner, the largest first."""
    lagging: tuple[tuple[str, str], ...] = ()
    """Nodes that likely sample with an older version than they name, each with the reason."""
    suspended: tuple[str, ...] = ()
    """Versions and groups on which many nodes of a class fail. Nodes are not condemned for these failures."""
    coarser: tuple[str, ...] = ()
    """Classes of numerics whose nodes round more than measured here, with their scales."""
