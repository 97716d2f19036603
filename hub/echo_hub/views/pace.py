"""Measure the capacity model's inputs from the database: the recent pace of the learner and of each node.

All inputs are medians or high quantiles over a window, so that one slow step, node or link does not dominate. Each
query reads a fixed number of the newest rows.

A node's throughput is its rate of rollouts while it has enough work. Usually it has less work, because work is leased
as late as possible without letting the learner wait. While n rollouts that take s_1 .. s_n seconds are sampled at the
same time, the rate is 1/s_1 + ... + 1/s_n. So the rate is defined at every moment, and its integral equals the number
of rollouts. A moment counts only if the node held at least `BUSY` times its median number of concurrent rollouts.
Delays in such a moment have their cause in the node, for example loading an adapter.

A node reports the sampling time of each rollout itself. This time counts only up to the lease's duration, and it cannot
raise the throughput above `TRUSTED` times the rate that the hub measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Final

from echo_hub.config.sections import CostConfig, HubConfig
from echo_hub.core.capacity.model import NodeClass, Workload
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.spread.holdings import quantile
from echo_hub.store.recent import NodeKind, RecentRollout, Spread, read_node_kinds, read_recent_rollouts, read_spreads
from echo_hub.store.reports import read_newest_step, read_steps
from echo_hub.store.store import Store
from echo_hub.views.learner_time import usual_hand_off_s
from echo_shared.records.run import StepRecord
from echo_shared.records.step_figures import SECONDS
from echo_shared.wire.messages import DropReason

STEPS_READ: Final = 64
ROLLOUTS_READ: Final = 20_000
VERSIONS_READ: Final = 16
VERSIONS_COUNTED: Final = 4
"""Number of newest versions to use, among those that have arrived at any node. Over a slow link, several versions are
in transit at a time.
"""

_Lease = tuple[float, float, float]
"""Times of one rollout: (leased, sampling began, received)."""

SLOW: Final = 0.9
"""A node's latency is this quantile of the times from lease to receipt of its rollouts."""

LATE: Final = 0.95
"""Share of nodes that must hold a version before the version counts as distributed."""

BUSY: Final = 0.75
"""If a node holds less than this share of its median concurrency, it counts as lacking work. Its throughput is measured
over the other moments."""

TRUSTED: Final = 2.0
"""Cap on a node's self-reported throughput, as a multiple of what the hub measured."""

LEAST_ROLLOUTS: Final = 3
"""If a node has fewer recent rollouts than this, it gets the throughput of nodes of the same kind."""

WASTED: Final = (DropReason.NO_ADVANTAGE, DropReason.INVALID, DropReason.SCORER_FAILED)
"""Drop reasons of received rollouts whose frequency does not depend on the number of nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPace:
    """Recent rates: how much work the learner consumes and how much the nodes supply."""

    workload: Workload
    nodes: tuple[NodeClass, ...]
    """One entry per node. Its name is that of the kind of node, such as an engine on a device."""
    kinds: tuple[NodeClass, ...]
    """One entry per kind, most numerous first, with the median node's values."""


def newest_steps(store: Store) -> list[StepRecord]:
    """Return the newest trained steps, at most `STEPS_READ`, in order."""
    newest = store.read(read_newest_step)
    return store.read(read_steps, newest.step - STEPS_READ, STEPS_READ) if newest else []


def read_pace(
    store: Store, config: HubConfig, steps: Sequence[StepRecord], connected: Collection[str] | None
) -> RunPace | None:
    """Return the measurements; None before the first step that took any time.

    `connected` are the nodes that count; None means all recently active ones.
    """
    if not steps:
        return None
    workload = _workload(config, steps, store.read(read_spreads, VERSIONS_READ))
    if workload.step_s <= 0:
        return None
    work = _by_node(store.read(read_recent_rollouts, ROLLOUTS_READ), since=_settled_at(steps))
    if config.run.mode == "sequential":
        trained_at = [step.trained_at for step in steps]
        work = {node_id: behind_versions(leases, trained_at, workload.broadcast_s) for node_id, leases in work.items()}
    counted = set(work if connected is None else connected)
    if config.run.mode == "colocated":
        counted.add(HUB_NODE_ID)
    said = store.read(read_node_kinds, counted | work.keys())
    nodes = tuple(
        replace(node, cost_per_h=cost_per_hour(config.cost, said.get(node_id)))
        for node_id, node in _nodes(work, said, counted)
    )
    return RunPace(workload=workload, nodes=nodes, kinds=kinds_of(nodes))


def kinds_of(nodes: Iterable[NodeClass]) -> tuple[NodeClass, ...]:
    """Return the kinds of nodes, most numerous first, with the median over each kind's nodes."""
    by_name: dict[str, list[NodeClass]] = defaultdict(list)
    for node in nodes:
        by_name[node.name].append(node)
    kinds = (_median_node(name, of_kind) for name, of_kind in by_name.items())
    return tuple(sorted(kinds, key=lambda kind: (-kind.count, kind.name)))


def _median_node(name: str, nodes: Sequence[NodeClass]) -> NodeClass:
    return NodeClass(
        name=name,
        count=sum(node.count for node in nodes),
        rollouts_per_s=median(node.rollouts_per_s for node in nodes),
        latency_s=median(node.latency_s for node in nodes),
        cost_per_h=median(node.cost_per_h for node in nodes),
    )


def _workload(config: HubConfig, steps: Sequence[StepRecord], spreads: Sequence[Spread]) -> Workload:
    return Workload(
        mode=config.run.mode,
        rollouts_per_step=median(step.num_rollouts for step in steps) * (1 + _share_wasted(steps)),
        train_s=median(step.figures[SECONDS.key] or 0.0 for step in steps),
        hand_off_s=usual_hand_off_s(steps),
        broadcast_s=broadcast_s(spreads),
        max_staleness=config.training.max_staleness if config.run.mode == "async" else 0,
        publish_every=config.training.publish_every if config.run.mode == "async" else 1,
    )


def broadcast_s(spreads: Sequence[Spread]) -> float:
    """Return how many seconds a version takes to reach nearly all nodes: the median over versions, 0 if unknown.

    A version's time counts from the end of its training, or from the arrival of the previous version if that is later.
    `spreads` are given newest first. Versions that arrived at no node are ignored. If possible, the newest and the
    oldest version are skipped: the newest may still be in transit, and the oldest one's predecessor is unknown.
    """
    took: list[float] = []
    free_at = float("-inf")
    for spread in reversed(spreads):
        late = quantile(spread.seconds, LATE)
        if late is not None and spread.trained_at is not None:
            arrived_at = max(spread.published_at, spread.trained_at) + late
            took.append(max(0.0, arrived_at - max(spread.trained_at, free_at)))
            free_at = max(free_at, arrived_at)
    settled = took[:-1] or took
    return median(settled[1:][-VERSIONS_COUNTED:] or settled) if settled else 0.0


def behind_versions(leases: Sequence[_Lease], trained_at: Sequence[float], broadcast_s: float) -> list[_Lease]:
    """Return the leases with their begin moved to the time at which their version had arrived at the node.

    In sequential mode, work is leased while its version is still on its way to the node. That time belongs to the
    distribution, not to the node. `trained_at` lists when each version was trained, in order.
    """
    there = []
    for begin, drawn_from, end in leases:
        number = bisect_right(trained_at, begin)
        arrived_at = trained_at[number - 1] + broadcast_s if number else begin
        there.append((min(drawn_from, max(begin, arrived_at)), drawn_from, end))
    return there


def _share_wasted(steps: Sequence[StepRecord]) -> float:
    """Return the number of received rollouts that no step could use, divided by the number of trained rollouts."""
    first, last = steps[0], steps[-1]
    trained = sum(step.num_rollouts for step in steps[1:])
    wasted = sum(last.dropped.get(reason, 0) - first.dropped.get(reason, 0) for reason in WASTED)
    return wasted / trained if trained else 0.0


def _settled_at(steps: Sequence[StepRecord]) -> float:
    """Return the time from which leases count. If there are later leases, those before the end of the run's first step
    are ignored, because engines were still starting.
    """
    return steps[0].trained_at if steps[0].step == 1 and len(steps) > 2 else float("-inf")


def _by_node(recent: Iterable[RecentRollout], *, since: float) -> dict[str, list[_Lease]]:
    work: dict[str, list[_Lease]] = defaultdict(list)
    for rollout in recent:
        if rollout.received_at is not None and rollout.leased_at >= since:
            begin, end = rollout.leased_at, max(rollout.received_at, rollout.leased_at)
            drawn_s = end - begin if rollout.sampling_s is None else max(0.0, rollout.sampling_s)
            work[rollout.node_id].append((begin, max(begin, end - drawn_s), end))
    return work


def _nodes(
    work: Mapping[str, Sequence[_Lease]], said: Mapping[str, NodeKind], counted: Collection[str]
) -> list[tuple[str, NodeClass]]:
    """Return the measured throughput and latency of each node in `counted`, as pairs of node id and `NodeClass`."""
    measured, scarce = {}, defaultdict(list)
    for node_id, leases in work.items():
        kind = _kind(node_id, said)
        if len(leases) >= LEAST_ROLLOUTS and (node := _node(kind, [leases])):
            measured[node_id] = node
        else:
            scarce[kind].append(leases)
    # In a large fleet, each node may have returned too few rollouts. Then measure all nodes of a kind together.
    together = (_node(kind, of_nodes) for kind, of_nodes in scarce.items())
    alike = {node.name: node for node in together if node} | {node.name: node for node in kinds_of(measured.values())}
    nodes = []
    for node_id in sorted(counted):
        like = measured.get(node_id) or alike.get(_kind(node_id, said))
        if like is not None:
            nodes.append((node_id, replace(like, count=1)))
    return nodes


def cost_per_hour(settings: CostConfig, said: NodeKind | None) -> float:
    """Return the cost of an active node in US dollars per hour, including electricity if its price is configured."""
    if said is None:
        return 0.0
    return said.cost_per_hour + said.power_watts / 1000 * settings.electricity_per_kwh


def _node(kind: str, of_nodes: Sequence[Sequence[_Lease]]) -> NodeClass | None:
    """Return the mean throughput and latency of these nodes as those of one node; None if their leases took no time."""
    took = sorted(end - begin for leases in of_nodes for begin, _, end in leases)
    held_s = sum(busy_seconds((begin, end) for begin, _, end in leases) for leases in of_nodes)
    if not held_s:
        return None
    drawn_s = sum(len(leases) / rate for leases in of_nodes if (rate := busy_rate(leases)))
    rate = min(len(took) / drawn_s if drawn_s else math.inf, TRUSTED * len(took) / held_s)
    return NodeClass(name=kind, count=1, rollouts_per_s=rate, latency_s=quantile(took, SLOW) or 0.0)


def busy_rate(leases: Iterable[_Lease]) -> float:
    """Return the node's rollouts per second while it had enough work; 0 if no rollout took any time."""
    changes: list[tuple[float, int, int, float]] = []
    """One entry for each change: (time, change of the number of held rollouts, change of the number of rollouts sampled
    at the same time, change of the rate).
    """
    for begin, drawn_from, end in leases:
        faster = 1 / (end - drawn_from) if end > drawn_from else 0.0
        changes += [(begin, 1, 0, 0.0), (drawn_from, 0, 1, faster), (end, -1, -1, -faster)]
    changes.sort()
    moments, held, at_once, rate = [], 0, 0, 0.0
    for (at, more_held, more, faster), (until, *_) in pairwise(changes):
        held, at_once, rate = held + more_held, at_once + more, rate + faster
        if held and until > at:
            moments.append((at_once, held, rate * (until - at) if at_once else 0.0, until - at))
    moments.sort()
    done = list(accumulate(drawn for _, _, drawn, _ in moments))
    if not done or not done[-1]:
        return 0.0
    enough = BUSY * moments[bisect_left(done, done[-1] / 2)][0]
    counted = [(drawn, seconds) for _, held, drawn, seconds in moments if held >= enough]
    return sum(drawn for drawn, _ in counted) / sum(seconds for _, seconds in counted)


def _kind(node_id: str, said: Mapping[str, NodeKind]) -> str:
    if node_id == HUB_NODE_ID:
        return "the hub itself"
    kind = said.get(node_id)
    return f"{kind.backend} · {kind.device}" if kind else "unknown"


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds covered by at least one of the periods, given as (begin, end)."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total
