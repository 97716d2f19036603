"""Progress of a node's work, for its user."""

from __future__ import annotations

from dataclasses import dataclass

from echo_shared.wire.messages import Fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkProgress:
    """Progress of the work loop at one moment."""

    rollouts: int
    """Unfinished leased rollouts. `tokens` counts their drawn tokens, `most_tokens` their maximum."""
    tokens: int
    most_tokens: int
    drawn_tokens: int
    """Tokens drawn since the work loop began; `finished_rollouts` has the same start."""
    finished_rollouts: int
    newest_by: Fetched | None
    """Report of the fetch of the newest usable version; None = no version is usable."""
    is_finishing: bool
    """True if the node accepts no leases and stops after its current ones."""
