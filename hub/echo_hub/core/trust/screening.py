"""Hints from the learner, which has every token's logits before it: whose rollouts look unlike all others'.

Under a newer policy than drew them, even honest draws lie outside their intervals: so a node is compared with the other
nodes of the same step, and never with what the drawing policy would show. Who stands out is no convict but a suspect:
its next rollouts are checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.likelihood import WEIGHTS

DISHONEST_DRAWS: Final = (0.0, 0.02, 0.05, 0.10, 0.25, 0.58)
"""Shares of tokens by class of `Evidence.draws` where they were not drawn by their u: where it lies has nothing to do
with their interval."""
DISHONEST_CLAIMS: Final = (0.0, 0.01, 0.03, 0.08, 0.18, 0.70)
"""Likewise by class of `Evidence.claims`, of invented log-probabilities."""
LEAST: Final = 1e-5
"""Smallest share that others' tokens are taken to have in any class: no single token makes a node stand out."""
SMOOTHING: Final = 1.0
"""Tokens that count in each class beside those that were seen (Laplace)."""


class Seen(NamedTuple):
    """One rollout as the learner has seen it."""

    node_id: str
    """The node that drew all of it."""
    evidence: Evidence
    staleness: int = 0


def standing_out(screened: Iterable[Seen], threshold: float) -> dict[str, float]:
    """The nodes whose tokens of one step weigh `threshold` nats or more against them, compared with all others', and
    what they weigh. Of a node that is alone nothing can be said.

    All nodes at once: a step has thousands of rollouts, and the core does nothing else meanwhile.
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
