"""How far a node is with what it holds, and what it has drawn: for its user's eyes."""

from __future__ import annotations

from dataclasses import dataclass

from echo_shared.messages import Fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A work loop's, at one moment."""

    rollouts: int
    """Leased and unfinished; the next two are of these."""
    tokens: int
    most_tokens: int
    drawn_tokens: int
    """Since the work loop began, as the next."""
    finished_rollouts: int
    newest_by: Fetched | None
    """How the newest version that the node can sample from came; None = there is none yet."""
    is_finishing: bool
    """It takes nothing new, and stops once it holds nothing."""
