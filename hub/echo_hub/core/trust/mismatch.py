"""Mismatch between each node's claims and the learner's log-probabilities, over the newest trained steps.

The mismatch is the KL divergence per token. It is shown to people and decides nothing: low-bit engines and stale
rollouts deviate more even when honest. An operator should examine a node that deviates more than similar nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import nlargest
from typing import Final

from echo_hub.core.trust.screening import Seen
from echo_shared.records.node import NodeMismatch

STEPS: Final = 16
"""Number of newest trained steps whose rollouts count."""
LEAST_TOKENS: Final = 64
"""Minimum number of tokens for showing a node: with fewer, a single odd token decides the mean."""
SHOWN: Final = 20
"""Number of nodes shown."""


class Mismatch:
    """Mismatch by node. The caller adds every step's rollouts; only those of the last `STEPS` steps are kept."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, tuple[float, int]]] = deque()
        self._largest: tuple[NodeMismatch, ...] | None = ()
        """Cached `largest`; None: not computed since the last step."""

    def add(self, screened: Iterable[Seen]) -> None:
        """Add the rollouts of one step."""
        of_step: dict[str, tuple[float, int]] = {}
        for node_id, evidence, _ in screened:
            kl, tokens = of_step.get(node_id, (0.0, 0))
            of_step[node_id] = (kl + evidence.mismatch_kl, tokens + evidence.num_tokens)
        self._steps.append(of_step)
        if len(self._steps) > STEPS:
            self._steps.popleft()
        self._largest = None

    @property
    def largest(self) -> tuple[NodeMismatch, ...]:
        """Return the `SHOWN` nodes with the largest mismatch, the largest first."""
        if self._largest is None:
            self._largest = tuple(nlargest(SHOWN, self._nodes(), key=lambda node: node.kl))
        return self._largest

    def _nodes(self) -> Iterable[NodeMismatch]:
        sums: dict[str, tuple[float, int]] = {}
        for of_step in self._steps:
            for node_id, (kl, tokens) in of_step.items():
                known_kl, known = sums.get(node_id, (0.0, 0))
                sums[node_id] = (known_kl + kl, known + tokens)
        for node_id, (kl, tokens) in sums.items():
            if tokens >= LEAST_TOKENS:
                yield NodeMismatch(node_id=node_id, kl=kl / tokens, num_tokens=tokens)
