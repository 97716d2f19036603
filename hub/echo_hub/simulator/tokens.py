"""Counts of the tokens that nodes sampled: total, repeated and lost ones."""

from __future__ import annotations

from collections.abc import Sequence

from echo_hub.simulator.node import Sampling


class TokenCounts:
    """Counts over planned and dropped groups; lost tokens and failures count over the whole run."""

    def __init__(self) -> None:
        self.drawn = 0
        self.given = 0
        """Tokens taken over from earlier attempts instead of sampled."""
        self.again = 0
        """Tokens sampled at a position already sampled under another lease of the index, with any version."""
        self.lost = 0
        """Tokens that vanished with a node before they were sent."""
        self.failures = 0
        """Number of times that a node vanished with unfinished rollouts."""

    def count(self, begun: Sequence[Sampling], now: float) -> None:
        """Count all attempts at rollouts of one group."""
        furthest: dict[int, int] = {}
        for sampling in begun:
            there = sampling.drawn(now)
            self.drawn += there - sampling.given
            self.given += sampling.given
            furthest[sampling.index] = max(there, furthest.get(sampling.index, 0))
            self.again += there - sampling.given
        self.again -= sum(furthest.values())

    def lose(self, tokens: Sequence[int]) -> None:
        """Count the unsent tokens of a node that vanished: `tokens` has one number per unfinished rollout."""
        self.failures += bool(tokens)
        self.lost += sum(tokens)
