"""What pages may know of trust."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo_hub.core.trust.mismatch import NodeMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustStatus:
    """Counts are since the hub's start, but for the nodes that are quarantined now."""

    checked: Mapping[str, int] = field(default_factory=dict)
    """Verdicts by class of numerics; one for each node that drew a part."""
    failed: Mapping[str, int] = field(default_factory=dict)
    abandoned: int = 0
    """Checks that the verifier could not make."""
    waiting: int = 0
    """Rollouts that the verifier has."""
    quarantined: int = 0
    checkers: int = 0
    """Connected nodes that say they can check others."""
    opinions: int = 0
    """What nodes have said of others' rollouts; several of one rollout count each."""
    disagreements: int = 0
    """Rollouts of which the first two said what does not go together."""
    outvoted: int = 0
    """Opinions that two others contradict."""
    checked_tokens: int = 0
    """That nodes were fed for it."""
    mismatch: tuple[NodeMismatch, ...] = ()
    """The nodes whose claims are farthest from what the learner finds, the farthest first."""
    lagging: tuple[tuple[str, str], ...] = ()
    """Nodes that likely draw with an older version than they name, each with what shows it."""
    suspended: tuple[str, ...] = ()
    """What so many nodes of a class fail on that none is condemned for it."""
    coarser: tuple[str, ...] = ()
    """Classes of numerics whose nodes all round more than was measured here, with their scales."""
