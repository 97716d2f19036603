"""On which terms the members of a step's groups are leased: how soon they are to be back, and how many go out at once.

    time   a step's work is to be back when the step begins, or as soon as the pool can do all that is open; where even
           a typical rollout takes longer than that, or the learner waits as it is, in up to twice what it takes; who
           would take longer gets none of it
    size   where the step is near, no more at once than share what is open among the nodes that have room

A step's work is released to all when it is needed, and earlier to whoever takes longer. What would be stale by the time
that it is back is nobody's: but where too little is leased for the next batch, the learner waits for more, whenever it
comes. A completion that becomes longer than expected, and so comes too late, costs its whole group; a learner that
waits costs even more: so lengths are taken as they may become, as far as the learner never waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from echo_hub.core.admission import Outlook, oldest_useful_version
from echo_hub.core.ledger import Ledger
from echo_hub.core.nodes.pace import UNBOUNDED
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.tempo import Tempo

TYPICAL: Final = 2.0
"""Times a typical rollout's, in which a rollout is to be back where the step should have begun already."""
CAREFUL: Final = 0.2
"""Where the learner waits so much of a step's time between two, lengths are taken as they are expected; where it never
does, as they may become."""
PATIENCE: Final = 2.0
"""The more the learner waits, the longer a rollout may take: all that is allowed where it waits for one part in so many
of `CAREFUL`."""
HURRY: Final = 2.0
"""A step that is to begin within so many times what a typical rollout takes has its groups spread over all nodes."""
EARLIER: Final = 1.3
"""A step's work is released to a slow node so many times its own time before the step begins."""
SOON_S: Final = 0.01
"""What is released so soon is released now."""


@dataclass(frozen=True, slots=True)
class Terms:
    oldest: int = 0
    """The oldest version that will do."""
    in_s: float = inf
    """They are to be back in so many seconds."""
    not_before_s: float = 0.0
    """Who would have them back sooner than this is not asked yet."""
    suits_s: float = inf
    """Who would take longer than this for one of them alone is not asked yet: shorter ones suit him better."""
    most: int = UNBOUNDED
    """So many at once, unless the prompt is long."""
    left_s: float = inf
    """Seconds until the step begins."""
    early_s: float = 0.0
    """Seconds until they are released to everybody."""
    stale_s: float = inf
    """What the oldest version draws is to be back in so many seconds, or it is stale."""
    step_s: float = 0.0
    """For what a version newer by one draws there is so much more time."""

    def by_version(self, policy_version: int) -> float:
        """In how many seconds what this version draws is to be back."""
        return min(self.in_s, self.stale_s + (policy_version - self.oldest) * self.step_s)


ANY: Final = Terms()


def typical_s(ledger: Ledger, nodes: Nodes) -> float:
    """Seconds from lease to arrival of a typical rollout; 0 while nobody knows."""
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
) -> Terms:
    """`num_groups` that `step` is to take want leases, `num_wanting` all in all."""
    oldest = oldest_useful_version(settings, step) if settings.mode == "async" else 0
    size = settings.group_size
    if not nodes.tokens_per_s:
        return Terms(oldest)
    a_rollout_s = ledger.lengths.mean_tokens / nodes.tokens_per_s
    usual_s = typical_s(ledger, nodes)
    left_s = tempo.begins(step, next_step=outlook.next_step, now=now) - now
    early_s = left_s - tempo.lead_s(outlook.later_batches * size * a_rollout_s, usual_s)
    if tempo.step_s is None:  # What is too early now is the more so later, until a step is trained.
        return Terms(oldest, not_before_s=inf if early_s > SOON_S else 0.0)
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
    return Terms(
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
    """Whether the learner waits for this step."""
    return step == outlook.next_step and tempo.waits


def _num_missing(ledger: Ledger, end: int) -> int:
    """Groups before this position in the queue that are not complete."""
    waiting, complete = ledger.waiting, ledger.complete
    num_complete = complete.position(waiting[end]) if end < len(waiting) else len(complete)
    return min(end, len(waiting)) - num_complete
