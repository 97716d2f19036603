"""Terms for leasing the members of a step's groups: the latest return time and the maximum lease size.

    time   work must be back when its step begins, or when the pool can finish all open work. If that is less than a
           typical rollout's time, or the learner already waits, up to twice a typical time is allowed. Slower nodes get
           none of this work
    size   near the step, a fair share of the open work per ready node

A step's work is released to all nodes when it is needed, and earlier to slower nodes. Work that would be stale on
return is leased to no node. Exception: if too little is leased for the next batch, late results are better than none. A
completion that outgrows its estimate returns late and costs its whole group. An idle learner costs even more. So length
estimates include a safety factor only as far as the learner does not wait.
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
"""Allowed time of a rollout for a step that is already due, as a multiple of a typical rollout's time."""
CAREFUL: Final = 0.2
"""Learner's idle fraction of a step at which length estimates lose their whole safety factor."""
PATIENCE: Final = 2.0
"""Slope of the allowed time with the learner's idle time: full allowance at CAREFUL / PATIENCE idle."""
HURRY: Final = 2.0
"""Nearness threshold, as a multiple of a typical rollout's time: a nearer step's groups are spread over all nodes."""
EARLIER: Final = 1.3
"""Early release to a slow node, as a multiple of the node's own time before the step begins."""
SOON_S: Final = 0.01
"""Waiting times up to this many seconds count as zero."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    oldest: int = 0
    """Oldest acceptable version."""
    in_s: float = inf
    """Latest return, in seconds from now."""
    not_before_s: float = 0.0
    """Earliest return: nodes that would return sooner are not asked yet."""
    suits_s: float = inf
    """Upper bound for a single completion's time. Slower nodes should take shorter completions instead."""
    most: int = UNBOUNDED
    """Maximum number of rollouts per lease, unless the prompt is long."""
    left_s: float = inf
    """Seconds until the step begins."""
    early_s: float = 0.0
    """Seconds until the work is released to all nodes."""
    stale_s: float = inf
    """Seconds after which rollouts of the oldest version are stale."""
    step_s: float = 0.0
    """Extra seconds until staleness for each newer version."""

    def by_version(self, policy_version: int) -> float:
        """Return the seconds in which rollouts of this version must be back."""
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
    """Return the terms for `num_groups` groups of `step` that want leases; `num_wanting` groups want leases in
    total."""
    oldest = oldest_useful_version(settings, step) if settings.mode == "async" else 0
    size = settings.group_size
    if not nodes.tokens_per_s:
        return LeaseTerms(oldest)
    a_rollout_s = ledger.lengths.mean_tokens / nodes.tokens_per_s
    usual_s = typical_s(ledger, nodes)
    left_s = tempo.begins(step, next_step=outlook.next_step, now=now) - now
    early_s = left_s - tempo.lead_s(outlook.later_batches * size * a_rollout_s, usual_s)
    if tempo.step_s is None:  # Too early now means even more too early later, until a step is trained.
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
