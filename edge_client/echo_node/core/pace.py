"""Number of rollouts that a node can finish in time, estimated from measurements."""

from __future__ import annotations

from typing import Final

_MEMORY: Final = 64
"""Number of newest completions whose mean length is the expected length of the next ones."""
_SLACK: Final = 0.25
"""Minimum relative change of the number of affordable rollouts before `affordable` returns the new number, so that it
does not change with every completion.
"""


class OwnPace:
    """Estimate of how many rollouts this node finishes in time, from its speed and the length of its completions.

    Rollouts should finish in half of their deadline: a node that halves its speed is then still on time.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """Tokens per second of the engine; 0 = unknown."""
        self._deadline_s = 0.0
        self._mean_tokens = 0.0
        self._completions = 0
        self._told = 0

    def leased(self, deadline_s: float, max_tokens: int) -> None:
        """Record a lease. Until the first completion, completions are assumed to have the lease's maximum length."""
        self._deadline_s = deadline_s
        if self._completions == 0:
            self._mean_tokens = float(max_tokens)

    def finished(self, tokens: int, tokens_per_s: float, *, full: bool) -> None:
        """Record a completion's length and the engine's rate.

        `full`: the engine was fully loaded. With less work, its rate is only a lower bound.
        """
        self.tokens_per_s = tokens_per_s if full else max(self.tokens_per_s, tokens_per_s)
        self._completions = min(_MEMORY, self._completions + 1)
        self._mean_tokens += (tokens - self._mean_tokens) / self._completions

    def affordable(self, wanted: int) -> int:
        """Return the number of rollouts to ask for: `wanted`, or fewer if the node cannot finish that many in half of
        the deadline.
        """
        if self.tokens_per_s == 0.0 or self._deadline_s == 0.0:
            return wanted
        possible = max(1.0, self.tokens_per_s * self._deadline_s / (2.0 * max(1.0, self._mean_tokens)))
        if abs(possible - self._told) > _SLACK * self._told:
            self._told = int(min(possible, 2.0**31))
        return min(wanted, self._told)
