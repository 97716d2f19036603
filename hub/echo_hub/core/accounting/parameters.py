"""Sampling parameters of one lease, where they differ from the run's own; rules of a group whose episodes are
sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

GREEDY_BELOW: Final = 0.01
"""Completions below this temperature are checked as greedy ones: each token must be one of the likeliest. At such a
temperature, draws choose among tokens whose logits lie within about a tenth of a nat of the largest. Rounding of logits
also decides between such tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How the nodes draw the completions of a tenant's request, and which tokens or lengths end a completion. A group
    without these parameters is drawn with the run's settings.
    """

    temperature: float
    """Divisor of the logits, above 0. For greedy completions, 1e-9."""
    max_tokens: int
    """Token limit of a completion, including the stop token."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a completion. Empty: no token ends it."""
    stop_strings: tuple[str, ...] = ()
    """The hub cuts a completion after the token that completes one of these texts."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """Rules of a group whose episodes are sessions: an environment with state plays each episode. A group without these
    rules has no sessions."""

    verify_first: bool = False
    """True if the environment gets a turn only after the turn's check, because its actions cost money or act outside
    the hub."""
    losses: int = 2
    """Number of lost sessions at which an episode ends, with the reward that its environment gives for this case."""


class RulesOfGroups(Protocol):
    """Function from the id of a training or evaluation group to the rules of its sessions."""

    def __call__(self, group_id: int) -> SessionRules | None:
        """Return the rules of the group's sessions, at every call the same; None: the group has no sessions."""
