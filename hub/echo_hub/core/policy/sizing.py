"""The policy of lease sizing, as pure functions of measured figures: how many groups may be open, and on which terms a
step's work is leased (deadline, oldest version, lease size).

A learner with version k - 1 trains step k. A rollout sampled with version p then has staleness k - 1 - p. Admission
(`room`) follows AReaL (arXiv 2505.24298, section 5.1), which opens at most (S + v + 1)·B - consumed groups, with the
staleness bound S and B groups per step. Two things differ. First, `v` is the version that new leases name, at most the
learner's version: the older `v` is, the fewer groups may be open. Second, the count does not start at the beginning of
the run. It is the number of groups in all steps that have no batch and may still consume samples of `v`, minus the
waiting groups. So it stays right after restarts, after drops, and with variable batch sizes.

The terms of a step's work (`terms_of_step`):

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
from typing import Final, NamedTuple

from echo_hub.core.accounting.groups import RolloutGroup
from echo_hub.core.nodes.node import Node
from echo_hub.core.nodes.pace import UNBOUNDED
from echo_hub.core.policy.measured import Tempo
from echo_hub.core.settings import CoordinatorSettings

TYPICAL: Final = 2.0
"""Time allowed for a rollout whose step is already due, in multiples of a typical rollout's time. Set by hand."""
CAREFUL: Final = 0.2
"""Idle time of the learner, as a fraction of a step, above which length estimates have no safety factor. Set by
hand.
"""
PATIENCE: Final = 2.0
"""Sets how the idle time of the learner lengthens the time allowed for a rollout: from an idle time of CAREFUL /
PATIENCE of a step on, `TYPICAL` applies in full. Set by hand.
"""
HURRY: Final = 2.0
"""A step is near if it begins within this many times a typical rollout's time: its groups are then spread over all free
nodes. Set by hand: time for a rollout and one replacement."""
URGENT: Final = 2.0
"""Work is urgent if its step begins within this many times a typical rollout's time. Urgent work goes to the fastest
nodes first and to unproven ones last, because no time is left to replace a lost rollout. Set by hand, like `HURRY`."""
EARLIER: Final = 1.3
"""Factor on the time that a slow node needs for a step's work. The product is how long before the step begins the node
may get this work. Set by hand."""
SOON_S: Final = 0.01
"""Work that all nodes may lease within this many seconds counts as released to them now. Set by hand."""
PREFILL: Final = 1 / 16
"""Assumed time for the prefill of one prompt token, relative to sampling one token. Set by hand, not measured."""
PREFILL_SHARE: Final = 1 / 4
"""Largest prefill time that a lease should have, relative to its sampling time: with a long prompt, a lease gets more
completions. Set by hand."""
LATE: Final = 1.5
"""A rollout is late once its expected time times this factor has passed. The expected time is the node's time for all
work that it holds plus one of the longest completions. Set by hand."""
LATE_S: Final = 2.0
"""Seconds added to the time that `LATE` allows, for the transit to the node and back. Set by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Number of groups that the hub expects in the coming steps' batches."""

    next_step: int
    """First step that has no planned batch yet."""
    next_batch: int
    """Expected number of groups in `next_step`; at least 1."""
    later_batches: int
    """Expected number of groups in each later step; 0 = unknown."""

    def step_of(self, position: int) -> int:
        """Return the step that is expected to take the group at `position` of the learner's queue; position 0 is the
        oldest waiting group."""
        if position < self.next_batch:
            return self.next_step
        return self.next_step + 1 + (position - self.next_batch) // max(1, self.later_batches)

    def end_of(self, step: int) -> int:
        """Return the first position of the learner's queue after the groups of this step."""
        return self.next_batch + (step - self.next_step) * max(1, self.later_batches)


def room(settings: CoordinatorSettings, outlook: Outlook, *, lease_version: int, waiting_groups: int) -> int:
    """Return how many groups may be opened now, if new leases name `lease_version`. `waiting_groups`: groups being
    prepared, open or complete, but in no batch."""
    steps_after = min(settings.staleness_bound + lease_version + 1, settings.steps) - outlook.next_step
    if steps_after < 0:
        return 0
    return max(0, outlook.next_batch + steps_after * outlook.later_batches - waiting_groups)


def oldest_useful_version(settings: CoordinatorSettings, step: int) -> int:
    """Return the oldest version whose rollouts step `step` may consume."""
    return max(0, step - 1 - settings.staleness_bound)


class Supply(NamedTuple):
    """Measured figures of all nodes together (the pool)."""

    rollout_s: float | None
    """Seconds in which all nodes together sample one typical rollout; None = no node's speed is known."""
    typical_s: float
    """Seconds from lease to arrival of a typical rollout; 0 = unknown."""
    longer: float
    """Safety factor: few completions are longer than their predicted length times this factor."""
    scoring_s: float
    """Seconds from a rollout's arrival to its reward."""


class StepWork(NamedTuple):
    """How much of one step's work is unfinished, in groups."""

    step: int
    num_wanting: int
    """Number of the step's groups with a rollout to lease (first or repeated lease)."""
    num_missing: int
    """Number of incomplete groups of this step and the steps before it."""
    num_leased: int
    """Number of incomplete groups, of all steps, whose missing rollouts are all held by nodes."""


class LeaseTerms(NamedTuple):
    """Terms on which a node may lease a step's work: versions, time and number of rollouts."""

    oldest: int = 0
    """Oldest version that a lease may name."""
    in_s: float = inf
    """Seconds from now within which a node must return the work."""
    not_before_s: float = 0.0
    """Least time in seconds that a node must need for the work to get it now. Faster nodes get the work later."""
    suits_s: float = inf
    """Longest time in seconds that a node may need for one completion of this work. Slower nodes should take shorter
    completions instead."""
    most: int = UNBOUNDED
    """Maximum number of rollouts per lease, unless the prompt is long."""
    left_s: float = inf
    """Seconds until the step for which the work is leased begins."""
    early_s: float = 0.0
    """Seconds until all nodes may lease the work; 0 = they may now."""
    stale_s: float = inf
    """Seconds from now after which rollouts sampled with version `oldest` are too stale for their step."""
    step_s: float = 0.0
    """Seconds that each version newer than `oldest` adds to `stale_s`."""
    typical_s: float = 0.0
    """Seconds from lease to arrival of a typical rollout; 0 = unknown."""
    is_urgent: bool = False
    """True if no time is left to replace a lost rollout."""

    def by_version(self, policy_version: int) -> float:
        """Return the seconds from now within which a rollout sampled with this version must be back: neither after
        `in_s` nor too stale for its step."""
        return min(self.in_s, self.stale_s + (policy_version - self.oldest) * self.step_s)


ANY: Final = LeaseTerms()


def terms_of_step(
    work: StepWork,
    supply: Supply,
    *,
    settings: CoordinatorSettings,
    outlook: Outlook,
    tempo: Tempo,
    num_ready: int,
    now: float,
) -> LeaseTerms:
    """Return the terms for leasing a step's work. `num_ready`: number of nodes with free capacity. `tempo`: measured
    timing of the learner's steps."""
    step, size, usual_s = work.step, settings.group_size, supply.typical_s
    oldest = oldest_useful_version(settings, step) if settings.mode == "async" else 0
    if supply.rollout_s is None:
        return LeaseTerms(oldest, typical_s=usual_s)
    left_s = tempo.begins(step, next_step=outlook.next_step, now=now) - now
    early_s = left_s - tempo.lead_s(outlook.later_batches * size * supply.rollout_s, usual_s)
    if tempo.step_s is None:  # Without a measured step time, nothing tells how early to release work.
        return LeaseTerms(oldest, not_before_s=inf if early_s > SOON_S else 0.0, typical_s=usual_s)
    every_s = tempo.every_s
    spare = max(0.0, 1.0 - (every_s / max(tempo.step_s, SOON_S) - 1.0) / CAREFUL)
    missing_s = work.num_missing * size * supply.rollout_s
    patience = 1.0 if left_s < usual_s else min(1.0, PATIENCE * (1.0 - spare))
    in_s = max(left_s, missing_s, patience * TYPICAL * usual_s)
    longer = 1.0 + (supply.longer - 1.0) * spare
    stale_s = inf
    is_next = step == outlook.next_step
    is_awaited = is_next and (tempo.waits or work.num_leased < outlook.next_batch)
    if settings.mode == "async" and not is_awaited:
        waiting_s = (step - outlook.next_step) * (every_s - tempo.step_s)
        stale_s = (left_s + waiting_s - supply.scoring_s) / longer
    is_early = early_s > SOON_S
    is_near = not is_early and left_s < HURRY * usual_s
    return LeaseTerms(
        oldest,
        in_s,
        not_before_s=left_s / EARLIER if is_early else 0.0,
        most=ceil(work.num_wanting * size / num_ready) if is_near else UNBOUNDED,
        left_s=left_s,
        early_s=early_s if is_early else 0.0,
        stale_s=stale_s,
        step_s=every_s / longer,
        typical_s=usual_s,
        is_urgent=left_s < URGENT * usual_s,
    )


def lease_size(node: Node, group: RolloutGroup, terms: LeaseTerms, expected_tokens: float) -> int:
    """Return the maximum number of the group's rollouts in one lease to the node; 0: the node cannot return any in
    time. `expected_tokens`: expected length of each; 0 = unknown.

    The terms limit the number so that all nodes get a fair share. A long prompt raises it, so that its prefill costs
    little per completion. Free capacity of the node limits the lease further.
    """
    fitting = UNBOUNDED
    if expected_tokens and (terms.in_s < inf or terms.not_before_s):
        in_s, own = terms.in_s, node.policy_version
        if terms.stale_s < inf and own is not None:  # The oldest rollout decides how stale its group is.
            in_s = terms.by_version(own if group.oldest_leased is None else min(own, group.oldest_leased))
        fitting = node.pace.fits(node.held_tokens, expected_tokens, in_s)
        if not fitting:
            return 0
    worth = ceil(group.prompt_tokens * PREFILL / (PREFILL_SHARE * expected_tokens)) if expected_tokens else 1
    return min(fitting, max(terms.most, worth))


def lateness_s(
    node: Node, terms: LeaseTerms, *, count: int, expected_tokens: float, long_tokens: float, token_s: float
) -> float:
    """Return after how many seconds a rollout of a lease of `count` counts as late, so that other nodes get its index
    too. `long_tokens`: length of the longest completions; `token_s`: typical seconds per token; each 0 = unknown."""
    if not long_tokens or not token_s or node.is_hub:
        return inf
    if node.proven:
        queued = node.held_tokens + (count - 1) * expected_tokens
        return LATE_S + LATE * node.pace.finish_s(queued, long_tokens)
    # Another node must get the index early enough to finish it for this step.
    in_time_s = max(terms.typical_s, terms.left_s - TYPICAL * terms.typical_s)
    return min(in_time_s, LATE_S + LATE * count * long_tokens * token_s)
