"""What became of the tokens that nodes drew: how many were drawn again, or lost with a node."""

from __future__ import annotations

from collections.abc import Sequence

from echo_hub.simulator.node import Sampling


class TokenCounts:
    """Of groups that are trained or dropped; what was lost, and failures, of the whole run."""

    def __init__(self) -> None:
        self.drawn = 0
        self.given = 0
        """Not drawn by who went on with them."""
        self.again = 0
        """Of those drawn: in the place of one that another lease of the index had drawn before, by whatever version."""
        self.lost = 0
        """Drawn by nodes that vanished with them, and not sent before."""
        self.failures = 0
        """Times that a node vanished with unfinished rollouts."""

    def count(self, begun: Sequence[Sampling], now: float) -> None:
        """All that was begun of one group."""
        furthest: dict[int, int] = {}
        for sampling in begun:
            there = sampling.drawn(now)
            self.drawn += there - sampling.given
            self.given += sampling.given
            furthest[sampling.index] = max(there, furthest.get(sampling.index, 0))
            self.again += there - sampling.given
        self.again -= sum(furthest.values())

    def lose(self, tokens: Sequence[int]) -> None:
        """A node has vanished; of each of its unfinished rollouts, so many were not sent."""
        self.failures += bool(tokens)
        self.lost += sum(tokens)
