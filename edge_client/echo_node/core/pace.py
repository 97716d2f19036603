"""How many rollouts a node can finish in time, from what was measured."""

from __future__ import annotations

from typing import Final

_MEMORY: Final = 64
"""Completions over which the mean length is taken."""
_SLACK: Final = 0.25
"""A change of the answer that is smaller than this is not worth telling the hub."""


class Pace:
    """What was measured of this node.

    A rollout is to be finished in half of its deadline, so that the node may be twice as slow as it was.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0 = unknown."""
        self._deadline_s = 0.0
        self._mean_tokens = 0.0
        self._completions = 0
        self._told = 0

    def leased(self, deadline_s: float, max_tokens: int) -> None:
        """Notes a lease; until completions were seen, they are taken to be as long as they may."""
        self._deadline_s = deadline_s
        if self._completions == 0:
            self._mean_tokens = float(max_tokens)

    def finished(self, tokens: int, tokens_per_s: float, *, full: bool) -> None:
        """Notes a completion's length and the engine's rate.

        `full`: the engine had as much work as it takes; with less, its rate is only a lower bound.
        """
        self.tokens_per_s = tokens_per_s if full else max(self.tokens_per_s, tokens_per_s)
        self._completions = min(_MEMORY, self._completions + 1)
        self._mean_tokens += (tokens - self._mean_tokens) / self._completions

    def affordable(self, wanted: int) -> int:
        """`wanted` rollouts, or as many as can be finished in time, at least 1."""
        if self.tokens_per_s == 0.0 or self._deadline_s == 0.0:
            return wanted
        possible = max(1.0, self.tokens_per_s * self._deadline_s / (2.0 * max(1.0, self._mean_tokens)))
        if abs(possible - self._told) > _SLACK * self._told:
            self._told = int(min(possible, 2.0**31))
        return min(wanted, self._told)
