"""Progress of a node's work, shown to its user."""

from __future__ import annotations

from dataclasses import dataclass

from echo_shared.wire.messages import Fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkProgress:
    rollouts: int
    """Number of unfinished leased rollouts. `tokens` is their present length in total, `most_tokens` their maximum
    length in total.
    """
    tokens: int
    most_tokens: int
    drawn_tokens: int
    """Tokens drawn since the work loop began. `finished_rollouts` counts the rollouts finished since then."""
    finished_rollouts: int
    newest_by: Fetched | None
    """Report of the fetch of the newest usable version; None = no version is usable."""
    tenants: tuple[str, ...]
    """Names of the tenants whose leases the node holds, in alphabetical order."""
    is_finishing: bool
    """True if the node accepts no new leases and stops after its current ones."""
