"""How far each node's claims are from what the learner finds of the same tokens, over the newest trained steps.

For people to look at: it decides nothing. An engine of few bits is honestly farther off than one of many, and an old
rollout farther than a new one; a node that is far off beside others of its kind is worth a look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from echo_hub.core.trust.screening import Seen

STEPS: Final = 16
"""Older ones are forgotten."""
LEAST_TOKENS: Final = 64
"""Of fewer, one odd token is all there is to see."""
SHOWN: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMismatch:
    """One node's."""

    node_id: str
    kl: float
    """Mean over the tokens of the estimate of KL(claimed ‖ the learner's), nats."""
    num_tokens: int


class Mismatch:
    """Told of every step's rollouts; memory grows with the nodes of `STEPS` steps alone."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, tuple[float, int]]] = deque()
        self._largest: tuple[NodeMismatch, ...] | None = ()
        """None: to be found again."""

    def add(self, screened: Iterable[Seen]) -> None:
        """One step's rollouts, each with its node."""
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
        """The nodes that are farthest off, the farthest first."""
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
