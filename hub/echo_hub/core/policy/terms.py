"""Terms for leasing the members of a step's groups: the latest return time and the maximum lease size.

    time   rollouts must be back when their step begins, or when the pool can finish all missing ones, if that is later.
           If a typical rollout takes longer than that, or the learner often waits, up to twice a typical time is
           allowed. Nodes that are slower still get none of this work
    size   shortly before the step, an equal share of the work for each node with free capacity

A step's work may be leased to all nodes once it is needed, and earlier to slower nodes. Work that would be stale on
return is leased to no node. Exception: if too little is leased for the next batch, late results are better than none. A
completion that is longer than estimated returns stale and costs its whole group, so estimates include a safety factor.
An idle learner costs even more, so the safety factor shrinks to nothing if the learner waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.nodes.pace import UNBOUNDED
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.policy.admission import Outlook, oldest_useful_version
from echo_hub.core.policy.tempo import Tempo
from echo_hub.core.settings import CoordinatorSettings

TYPICAL: Final = 2.0
"""Time allowed for a rollout whose step is already due, as a multiple of a typical rollout's time."""
CAREFUL: Final = 0.2
"""Idle time of the learner, as a fraction of a step, at which length estimates have no safety factor left."""
PATIENCE: Final = 2.0
"""How fast the allowed time grows with the learner's idle time: `TYPICAL` is fully allowed at CAREFUL / PATIENCE
idle."""
HURRY: Final = 2.0
"""A step that begins within this many times a typical rollout's time is near: its groups are spread over all free
nodes."""
EARLIER: Final = 1.3
"""A slow node may begin with a step's work this many times its own sampling time before the step begins."""
SOON_S: Final = 0.01
"""Times until the release of work up to this many seconds count as zero."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    oldest: int = 0
    """Oldest version that a lease may name."""
    in_s: float = inf
    """Seconds from now within which a node must return the work."""
    not_before_s: float = 0.0
    """Seconds from now: only nodes that take at least this long may begin; faster nodes get the work later."""
    suits_s: float = inf
    """Longest seconds that a node may need for one such completion. Slower nodes should take shorter completions
    instead."""
    most: int = UNBOUNDED
    """Maximum number of rollouts per lease, unless the prompt is long."""
    left_s: float = inf
    """Seconds until the step begins."""
    early_s: float = 0.0
    """Seconds until all nodes may lease the work; 0 = they may now."""
    stale_s: float = inf
    """Seconds from now after which rollouts of version `oldest` are too stale for their step."""
    step_s: float = 0.0
    """Seconds by which rollouts of each newer version become stale later."""

    def by_version(self, policy_version: int) -> float:
        """Return the seconds within which rollouts of this version must be back."""
        return min(self.in_s, self.stale_s + (policy_version - self.oldest) * self.step_s)


ANY: Final = LeaseTerms()


def typical_s(ledger: Ledger, nodes: Nodes) -> float:
    """Return the seconds from lease to arrival of a typical rollout; 0 = unknown."""
    return ledger.lengths.mean_tokens * nodes.typical_token_s + nodes.typical_way_s


def terms_of_step(
    step: int,
    num_groups: int,
    now: float,
    *,
    num_wanting: int,
    settings: CoordinatorSettings,
    ledger: Ledger,
    nodes: Nodes,
    outlook: Outlook,
    tempo: Tempo,
) -> LeaseTerms:
    """Return the terms for leasing the `num_groups` groups of `step` that want leases. `num_wanting`: number of groups
    of all steps that want leases."""
    oldest = oldest_useful_version(settings, step) if settings.mode == "async" else 0
    size = settings.group_size
    if not nodes.tokens_per_s:
        return LeaseTerms(oldest)
    a_rollout_s = ledger.lengths.mean_tokens / nodes.tokens_per_s
    usual_s = typical_s(ledger, nodes)
    left_s = tempo.begins(step, next_step=outlook.next_step, now=now) - now
    early_s = left_s - tempo.lead_s(outlook.later_batches * size * a_rollout_s, usual_s)
    if tempo.step_s is None:  # Until a step ends, work that is too early stays so.
        return LeaseTerms(oldest, not_before_s=inf if early_s > SOON_S else 0.0)
    every_s = tempo.every_s
    spare = max(0.0, 1.0 - (every_s / max(tempo.step_s, SOON_S) - 1.0) / CAREFUL)
    missing_s = _num_missing(ledger, outlook.end_of(step)) * size * a_rollout_s
    patience = 1.0 if left_s < usual_s else min(1.0, PATIENCE * (1.0 - spare))
    in_s = max(left_s, missing_s, patience * TYPICAL * usual_s)
    longer = 1.0 + (ledger.lengths.longer - 1.0) * spare
    stale_s = inf
    num_leased = len(ledger.waiting) - num_wanting
    is_awaited = is_late(step, outlook, tempo) or (step == outlook.next_step and num_leased < outlook.next_batch)
    if settings.mode == "async" and not is_awaited:
        waiting_s = (step - outlook.next_step) * (every_s - tempo.step_s)
        stale_s = (left_s + waiting_s - ledger.scoring_s) / longer
    is_early = early_s > SOON_S
    is_near = not is_early and left_s < HURRY * usual_s
    return LeaseTerms(
        oldest,
        in_s,
        not_before_s=left_s / EARLIER if is_early else 0.0,
        most=ceil(num_groups * size / nodes.num_ready) if is_near else UNBOUNDED,
        left_s=left_s,
        early_s=early_s if is_early else 0.0,
        stale_s=stale_s,
        step_s=every_s / longer,
    )


def is_late(step: int, outlook: Outlook, tempo: Tempo) -> bool:
    """True if the learner waits for this step."""
    return step == outlook.next_step and tempo.waits


def _num_missing(ledger: Ledger, end: int) -> int:
    """Return how many groups before position `end` of the queue are incomplete."""
    waiting, complete = ledger.waiting, ledger.complete
    num_complete = complete.position(waiting[end]) if end < len(waiting) else len(complete)
    return min(end, len(waiting)) - num_complete
