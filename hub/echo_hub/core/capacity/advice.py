"""Advice on keeping the learner busy: more nodes, another staleness bound, another publication interval.

The goal (`target`) is a share of the learner's best possible utilisation, T_train / (T_train + hand-off): more nodes
cannot shorten the hand-off of a batch to the learner. All searches rely on monotonicity: more nodes, a larger bound or
faster dissemination never slow a schedule down. Placement evaluates the model for each candidate, as ReaL (arXiv
2406.14088) and Spreeze (arXiv 2312.06126) do. It tries every staleness bound, and takes nodes greedily by their cost
per rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from echo_hub.core.capacity.model import NodeClass, Pool, Workload
from echo_hub.core.capacity.schedule import SAME, period_s

MOST_NODES: Final = 1_000_000
"""Largest advised number of nodes of one class."""

STABLE_STALENESS: Final = 6
"""Largest staleness bound that is advised. In ECHO-2, section 5, learning stays stable up to 6 and can break at 11."""

HUNDREDTH: Final = 0.01
"""Gain in utilisation below which more nodes or an older policy are not worth it."""

NODES_TRIED: Final = tuple(2**power for power in range(11))
"""Numbers of added nodes that are tried if no number reaches the goal, to find the best utilisation that more nodes
give."""

FEWER_TRIED: Final = 4
"""Limit on the search for a cheaper mix of nodes: nodes of another class replace at most this number of nodes of the
cheapest class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Number of nodes of each class, and their total cost per hour."""

    counts: tuple[tuple[str, int], ...]
    cost_per_h: float

    @property
    def num_nodes(self) -> int:
        return sum(count for _, count in self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Settings and nodes with which the learner reaches the wanted utilisation (the goal) at the least cost."""

    max_staleness: int
    publish_every: int
    mix: Mix


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Measures that each let the learner reach the wanted utilisation (the goal) without any of the others; None = this
    measure cannot."""

    max_staleness: int | None
    """Smallest staleness bound that reaches the wanted utilisation with the current publication interval."""
    publish_every: int | None
    """Smallest number of steps between publications that reaches the wanted utilisation with the current staleness
    bound."""
    added: tuple[tuple[str, int | None], ...]
    """Number of additional nodes of each class, in the given order, with which the learner reaches the wanted
    utilisation; 0 if it already does."""


def reaches(workload: Workload, pool: Pool, target: float) -> bool:
    """Return True if the pool lets the learner reach the share `target` of its best possible utilisation."""
    if pool.rollouts_per_s * workload.step_s * (1 + 2 * SAME) < workload.rollouts_per_step * target:
        return False  # Most candidates of a search fail this cheap test.
    return period_s(workload, pool) * target <= workload.step_s * (1 + SAME)


def advise(
    workload: Workload, nodes: Sequence[NodeClass], kinds: Sequence[NodeClass], *, target: float = 1.0
) -> Advice:
    """Return each measure with which the learner reaches the share `target` of its best possible utilisation, starting
    from `nodes`. `kinds`: classes of nodes that could be added; their `count` is ignored."""
    pool = Pool.of(nodes)
    return Advice(
        max_staleness=smallest_staleness(workload, pool, target),
        publish_every=smallest_interval(workload, pool, target),
        added=tuple((kind.name, nodes_to_add(workload, pool, kind, target)) for kind in kinds),
    )


def smallest_staleness(workload: Workload, pool: Pool, target: float) -> int | None:
    """Return the smallest staleness bound with which the learner reaches the share `target` of its best possible
    utilisation; None: no advised bound suffices."""
    if workload.mode != "async":
        return None
    bounds = range(workload.publish_every - 1, STABLE_STALENESS + 1)
    return next((bound for bound in bounds if reaches(replace(workload, max_staleness=bound), pool, target)), None)


def smallest_interval(workload: Workload, pool: Pool, target: float) -> int | None:
    """Return the shortest publication interval, in steps, with which the learner reaches the share `target` of its best
    possible utilisation; None: none suffices."""
    if workload.mode != "async":
        return None
    intervals = range(1, workload.max_staleness + 2)
    return next((every for every in intervals if reaches(replace(workload, publish_every=every), pool, target)), None)


def nodes_to_add(workload: Workload, pool: Pool, kind: NodeClass, target: float) -> int | None:
    """Return how many additional nodes of the class `kind` let the learner reach the share `target` of its best
    possible utilisation; None: no number suffices."""
    return _fewest(MOST_NODES, lambda count: reaches(workload, pool.plus(replace(kind, count=count)), target))


def times_as_many(workload: Workload, nodes: Sequence[NodeClass], target: float) -> float | None:
    """Return the factor, to a hundredth, by which the nodes' throughput must be multiplied for the share `target` of
    the learner's best possible utilisation. None: no factor up to `MOST_NODES` suffices."""

    def enough(hundredths: int) -> bool:
        pool = Pool.of(nodes)
        return reaches(workload, Pool(latencies=pool.latencies, rates=pool.rates * hundredths / 100), target)

    fewest = _fewest(100 * MOST_NODES, enough)
    return None if fewest is None else fewest / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Best result of a measure with which the learner does not reach the wanted utilisation (the goal)."""

    amount: int
    """Number of added nodes, or the staleness bound: the smallest value whose utilisation is within a hundredth of the
    best."""
    busy: float
    """Share of time in which the learner trains or hands over, instead of waiting for rollouts."""


def busy_share(workload: Workload, pool: Pool) -> float:
    return workload.step_s / period_s(workload, pool)


def farthest_by_nodes(workload: Workload, pool: Pool, kind: NodeClass) -> Partial:
    """Return the best result of adding nodes of one class, up to max(NODES_TRIED) of them."""

    def with_more(count: int) -> float:
        return busy_share(workload, pool.plus(replace(kind, count=count)))

    shares = {count: with_more(count) for count in (0, *NODES_TRIED)}
    most = max(shares.values()) - HUNDREDTH
    enough = next(count for count, share in shares.items() if share >= most)
    few = max((count for count in shares if count < enough), default=enough)
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if with_more(middle) >= most else (middle, enough)
    return Partial(amount=enough, busy=with_more(enough))


def farthest_by_staleness(workload: Workload, pool: Pool) -> Partial | None:
    """Return the best result of a larger staleness bound; None: no larger one is advised."""
    bounds = range(workload.max_staleness + 1, STABLE_STALENESS + 1)
    if workload.mode != "async" or not bounds:
        return None
    shares = {bound: busy_share(replace(workload, max_staleness=bound), pool) for bound in bounds}
    least = next(bound for bound, share in shares.items() if share >= max(shares.values()) - HUNDREDTH)
    return Partial(amount=least, busy=shares[least])


def by_shorter_leases(workload: Workload, pool: Pool) -> float:
    """Return the share of time in which the learner would not wait if every rollout took half as long at the same
    throughput."""
    return busy_share(workload, Pool(latencies=pool.latencies / 2, rates=pool.rates))


def cheapest_to_add(workload: Workload, pool: Pool, kinds: Sequence[NodeClass], target: float) -> Mix | None:
    """Return the cheapest nodes with which the learner reaches the share `target` of its best possible utilisation: of
    one class, or mostly of one and some of another."""
    alone = {kind: nodes_to_add(workload, pool, kind, target) for kind in kinds}
    enough = {kind: count for kind, count in alone.items() if count is not None}
    if not enough:
        return None
    mixes = [_mix([(kind, count)]) for kind, count in enough.items()]
    best = min(enough, key=lambda kind: (enough[kind] * kind.cost_per_h, enough[kind]))
    for fewer in range(1, min(enough[best], FEWER_TRIED) + 1):
        most = replace(best, count=enough[best] - fewer)
        for other in kinds:
            rest = None if other is best else nodes_to_add(workload, pool.plus(most), other, target)
            if rest is not None:
                mixes.append(_mix([(best, most.count), (other, rest)]))
    return min(mixes, key=lambda mix: (mix.cost_per_h, mix.num_nodes))


def place(
    workload: Workload,
    available: Sequence[NodeClass],
    *,
    target: float = 1.0,
    largest_staleness: int = STABLE_STALENESS,
) -> Placement | None:
    """Return the cheapest settings and available nodes with which the learner reaches the share `target` of its best
    possible utilisation; on ties, the smallest staleness bound."""
    placements = []
    for bound in range(largest_staleness + 1) if workload.mode == "async" else [0]:
        # A longer publication interval only makes rollouts older, except if steps are shorter than the broadcast of a
        # version.
        every = 1 if workload.mode != "async" else max(1, math.ceil(workload.broadcast_s * target / workload.step_s))
        if every <= bound + 1:
            chosen = replace(workload, max_staleness=bound, publish_every=every)
            mix = _cheapest_of(chosen, available, target)
            if mix is not None:
                placements.append(Placement(max_staleness=bound, publish_every=every, mix=mix))
    return min(placements, key=lambda found: (found.mix.cost_per_h, found.max_staleness), default=None)


def _cheapest_of(workload: Workload, available: Sequence[NodeClass], target: float) -> Mix | None:
    """Return nodes that reach the goal, taken in order of cost per rollout; superfluous ones are removed afterwards."""
    order = sorted(available, key=lambda one: (_cost_of_rate(one), one.latency_s))
    taken = _fewest(sum(one.count for one in order), lambda n: reaches(workload, Pool.of(_first(order, n)), target))
    if taken is None:
        return None
    kept = list(_first(order, taken))
    for number in reversed(range(len(kept))):
        if kept[number].cost_per_h:
            rest = Pool.of(kept[:number] + kept[number + 1 :])
            kept[number] = replace(kept[number], count=nodes_to_add(workload, rest, kept[number], target) or 0)
    return _mix([(kind, kind.count) for kind in kept])


def _cost_of_rate(kind: NodeClass) -> float:
    return kind.cost_per_h / kind.rollouts_per_s if kind.rollouts_per_s else math.inf


def _first(order: Sequence[NodeClass], num_nodes: int) -> tuple[NodeClass, ...]:
    chosen = []
    for one in order:
        count = min(one.count, num_nodes)
        if count:
            chosen.append(replace(one, count=count))
        num_nodes -= count
    return tuple(chosen)


def _fewest(most: int, is_enough: Callable[[int], bool]) -> int | None:
    """Return the smallest number from 0 to `most` for which `is_enough` is True; None if there is none. `is_enough`
    must be monotonic."""
    if is_enough(0):
        return 0
    few, many = 0, 1
    while many < most and not is_enough(many):
        few, many = many, min(2 * many, most)
    if not is_enough(min(many, most)):
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if is_enough(middle) else (middle, many)
    return many


def _mix(nodes: Sequence[tuple[NodeClass, int]]) -> Mix:
    return Mix(
        counts=tuple((kind.name, count) for kind, count in nodes if count),
        cost_per_h=sum(kind.cost_per_h * count for kind, count in nodes),
    )
