"""Findings of the learner about a step's rollouts, and hints from them: nodes whose rollouts differ from those of all
other nodes. The learner computes every token's logits in training anyway.

The learner's policy is newer than the one that sampled. So even an honest draw's random number often lies outside the
interval of cumulative probability that draws the token under the learner's policy. Therefore a node is compared with
the other nodes of the same step, never with the sampling policy's distribution. A node that stands out is suspect, not
convicted: its next rollouts are checked.

The *mismatch* between a node's claims and the learner's log-probabilities, as KL divergence per token over the newest
trained steps, is shown to people and decides nothing: low-bit engines and stale rollouts deviate more even when honest.
An operator should examine a node that deviates more than similar nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any, Final, NamedTuple

import numpy as np

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.likelihood import WEIGHTS
from echo_shared.records.node import NodeMismatch

DISHONEST_DRAWS: Final = (0.0, 0.02, 0.05, 0.10, 0.25, 0.58)
"""Expected share of each class of `Evidence.draws` if a node did not sample its tokens with their uniform number u, so
that u lies at a random place."""
DISHONEST_CLAIMS: Final = (0.0, 0.01, 0.03, 0.08, 0.18, 0.70)
"""Expected share of each class of `Evidence.claims` if the log-probabilities are invented."""
LEAST: Final = 1e-5
"""Lower bound of the share of each error class among the other nodes' tokens, so that no single token makes a node
stand out."""
SMOOTHING: Final = 1.0
"""Number of tokens added to each error class of the other nodes (Laplace smoothing), so that no class is empty."""
STEPS: Final = 16
"""Number of newest trained steps whose rollouts count in a node's mismatch (KL divergence between its claims and the
learner's log-probabilities)."""
LEAST_TOKENS: Final = 64
"""Minimum number of tokens for showing a node's mismatch: with fewer, a single odd token decides the mean."""
SHOWN: Final = 20
"""Number of nodes whose mismatch is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScreen:
    """The learner's findings about one batch.

    Groups and rollouts are named by position in `group_ids` and `rollout_ids` of the step's `StepPlanned`. Screening
    the same batch again gives the same result.
    """

    left_out: tuple[int, ...] = ()
    """Groups that the learner left out of the step, because one of their rollouts claims log-probabilities that no
    honest engine can have."""
    suspects: tuple[int, ...] = ()
    """Rollouts that caused a group to be left out, or an update to be held back.

    For an episode of several turns, all its turns are listed; `screened` has evidence about each turn.
    """
    screened: Mapping[int, Evidence] = field(default_factory=dict)
    """Evidence about each rollout that the learner computed, in the learner's precision."""

    @classmethod
    def of(cls, frame: Mapping[str, Any]) -> StepScreen:
        """Build the learner's findings about one batch from the learner's message. Lists in the message are named like
        this class's fields. `screened` and each part of the evidence are parallel lists.
        """
        if not frame:
            return cls()
        evidence = zip(frame["screened"], frame["draws"], frame["claims"], frame["mismatch_kl"], strict=True)
        return cls(
            left_out=tuple(frame["left_out"]),
            suspects=tuple(frame["suspects"]),
            screened={
                place: Evidence(draws=tuple(draws), claims=tuple(claims), mismatch_kl=mismatch)
                for place, draws, claims, mismatch in evidence
            },
        )


class Seen(NamedTuple):
    """The learner's results for one rollout: evidence about the node that sampled the rollout."""

    node_id: str
    """Node that sampled all tokens of the rollout."""
    evidence: Evidence
    staleness: int = 0


def standing_out(screened: Iterable[Seen], threshold: float) -> dict[str, float]:
    """Return the nodes whose tokens of one step give at least `threshold` nats of evidence against them; the values are
    these nats.

    Each node's tokens are compared with those of all other nodes, so a single node cannot be judged. The computation is
    vectorised over nodes, because a step has thousands of rollouts and the event loop is blocked meanwhile.
    """
    numbers: dict[str, int] = {}
    of_node: list[int] = []
    rows: list[tuple[int, ...]] = []
    for node_id, evidence, _ in screened:
        of_node.append(numbers.setdefault(node_id, len(numbers)))
        rows.append(evidence.draws + evidence.claims)
    if len(numbers) < 2:
        return {}
    counts = np.zeros((len(numbers), len(rows[0])))
    np.add.at(counts, of_node, np.array(rows, np.float64))
    others = counts.sum(axis=0) - counts
    worst = np.full(len(numbers), -np.inf)
    for part, dishonest in (
        (slice(len(DISHONEST_DRAWS)), DISHONEST_DRAWS),
        (slice(len(DISHONEST_DRAWS), None), DISHONEST_CLAIMS),
    ):
        usual = others[:, part] + SMOOTHING
        shares = np.maximum(LEAST, usual / usual.sum(axis=1, keepdims=True))
        for w in WEIGHTS:
            weighed = (counts[:, part] * np.log(1.0 - w + w * np.array(dishonest) / shares)).sum(axis=1)
            worst = np.maximum(worst, weighed)
    worst[others.sum(axis=1) == 0] = -np.inf
    return {node_id: float(worst[number]) for node_id, number in numbers.items() if worst[number] >= threshold}


class Mismatch:
    """Mismatch of each node: KL divergence per token between its claims and the learner's log-probabilities. The caller
    adds every step's rollouts; only those of the last `STEPS` steps are kept."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, tuple[float, int]]] = deque()
        self._largest: tuple[NodeMismatch, ...] | None = ()
        """Cached `largest`; None: not computed since the last step."""

    def add(self, screened: Iterable[Seen]) -> None:
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
