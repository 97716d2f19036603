"""Settings for checking nodes' rollouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustSettings:
    """Settings for checks. By default nothing is checked: not every coordinator has a verifier process, or nodes that
    check."""

    enabled: bool = False
    by_nodes: bool = False
    """True: nodes check each other's rollouts. False: the hub's verifier process checks them."""
    check_deadline_s: float = 60.0
    """Time limit in seconds for a node's check of a rollout, and for the search for a node to check it."""
    secret: bytes = b""
    """Secret of the hub that decides which rollouts are checked. A node that knew it could forge only unchecked
    rollouts.
    """
    least_checked: float = 0.03
    """Lowest share of a proven node's rollouts that is checked, reached after many verified ones."""
    first_checked: int = 64
    """Minimum number of a node's first rollouts that are all checked before training."""
    false_alarm: float = 1e-6
    """Highest rate, per checked rollout, at which an honest node is wrongly convicted."""
    temperature: float = 1.0
    """Sampling temperature of all leases."""
    gguf_precision: str = ""
    """Precision that nodes report if they use the GGUF file of this hub; empty = the hub offers none."""
    miss: float = 1e-3
    """Highest probability that a node that forges a fifth of its tokens becomes proven."""
