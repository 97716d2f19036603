"""The capacity model's inputs, measured: how fast the learner and each node are of late, by the run's books.

All are medians or high quantiles over a window, so that one slow step, node or link does not decide. Every read is of
the newest so many rows.

A node's throughput is what it does when it has enough to do. Most of the time it may have less: work is leased as late
as keeps the learner busy. While n rollouts are drawn at once that take s_1 .. s_n seconds each, they are drawn at a
rate of 1/s_1 + ... + 1/s_n; so there is a rate at every moment, and over all of them it comes to all rollouts. The
moments count at which the node held at least `BUSY` times as many rollouts as it draws at once in the median of its
drawing. Then it has enough to do, and whatever keeps it from drawing them, another version's adapter say, is its own.
How long a rollout was drawn is the node's account, which counts for no more than its lease, and for no more than
`TRUSTED` times what the node returned while it held anything.
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
from echo_hub.core.spread.holdings import quantile
from echo_hub.store.recent import NodeKind, RecentRollout, Spread, read_node_kinds, read_recent_rollouts, read_spreads
from echo_hub.store.reports import read_newest_step, read_steps
from echo_hub.store.store import Store
from echo_hub.views.learner_time import usual_hand_off_s
from echo_shared.books import StepRecord
from echo_shared.messages import DropReason
from echo_shared.step_figures import SECONDS

STEPS_READ: Final = 64
ROLLOUTS_READ: Final = 20_000
VERSIONS_READ: Final = 16
VERSIONS_COUNTED: Final = 4
"""Of those that have arrived anywhere. Over a slow line several versions are under way at a time."""

_Lease = tuple[float, float, float]
"""When a rollout was leased, when it was begun to be drawn, and when it was received."""

SLOW: Final = 0.9
"""The quantile that a latency is."""

LATE: Final = 0.95
"""The quantile of nodes that have a version when it counts as disseminated."""

BUSY: Final = 0.75
"""Times the rollouts that a node draws at once in the median of its drawing: who holds fewer could do with more."""

TRUSTED: Final = 2.0
"""Times what a node returned while it held anything: more, its own account of its drawing does not make of it."""

LEAST_ROLLOUTS: Final = 3
"""A node that has returned fewer of late is taken to be like others of its kind."""

WASTED: Final = (DropReason.NO_ADVANTAGE, DropReason.INVALID, DropReason.SCORER_FAILED)
"""Rollouts that come in and that no step takes, however many nodes there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What the run's books say of the learner's appetite and the nodes' work."""

    workload: Workload
    nodes: tuple[NodeClass, ...]
    """One entry a node, named by its kind."""
    kinds: tuple[NodeClass, ...]
    """By kind, most numerous first: as many as there are, each as its median node."""


def newest_steps(store: Store) -> list[StepRecord]:
    """The newest trained steps, in order."""
    newest = store.read(read_newest_step)
    return store.read(read_steps, newest.step - STEPS_READ, STEPS_READ) if newest else []


def read_pace(
    store: Store, config: HubConfig, steps: Sequence[StepRecord], connected: Collection[str] | None
) -> Pace | None:
    """None before the first step that took any time. `connected`: the nodes that count; None = all that have worked of
    late."""
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
    return Pace(workload=workload, nodes=nodes, kinds=kinds_of(nodes))


def kinds_of(nodes: Iterable[NodeClass]) -> tuple[NodeClass, ...]:
    """The kinds among nodes, most numerous first, each as its median node."""
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
    """From a version's training, or from when nearly all nodes had the version before it, to when they had this one:
    the median of versions; 0 while none is known.

    `spreads`: newest first. Those that have arrived nowhere do not count. Of the others the newest may still be under
    way, and of the oldest nobody knows what came before it: both are left out where there are more.
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
    """Leases as from when their version was there.

    In sequential mode they go out while it is still on its way, which is the dissemination's time and not the node's.
    `trained_at`: when each version was trained, in order.
    """
    there = []
    for begin, drawn_from, end in leases:
        number = bisect_right(trained_at, begin)
        arrived_at = trained_at[number - 1] + broadcast_s if number else begin
        there.append((min(drawn_from, max(begin, arrived_at)), drawn_from, end))
    return there


def _share_wasted(steps: Sequence[StepRecord]) -> float:
    """Rollouts that no step could take, over those that were trained on."""
    first, last = steps[0], steps[-1]
    trained = sum(step.num_rollouts for step in steps[1:])
    wasted = sum(last.dropped.get(reason, 0) - first.dropped.get(reason, 0) for reason in WASTED)
    return wasted / trained if trained else 0.0


def _settled_at(steps: Sequence[StepRecord]) -> float:
    """Since when engines are warm: what is leased before the run's first step is trained tells little of what follows,
    once there is more."""
    return steps[0].trained_at if steps[0].step == 1 and len(steps) > 2 else float("-inf")


def _by_node(recent: Iterable[RecentRollout], *, since: float) -> dict[str, list[_Lease]]:
    """The received rollouts of each node that were leased since then."""
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
    """Each with its id."""
    measured, scarce = {}, defaultdict(list)
    for node_id, leases in work.items():
        kind = _kind(node_id, said)
        if len(leases) >= LEAST_ROLLOUTS and (node := _node(kind, [leases])):
            measured[node_id] = node
        else:
            scarce[kind].append(leases)
    # In a large fleet none of a kind may have returned enough by itself.
    together = (_node(kind, of_nodes) for kind, of_nodes in scarce.items())
    alike = {node.name: node for node in together if node} | {node.name: node for node in kinds_of(measured.values())}
    nodes = []
    for node_id in sorted(counted):
        like = measured.get(node_id) or alike.get(_kind(node_id, said))
        if like is not None:
            nodes.append((node_id, replace(like, count=1)))
    return nodes


def cost_per_hour(settings: CostConfig, said: NodeKind | None) -> float:
    """What a node costs while it is active, in US dollars, its power included where that is counted."""
    if said is None:
        return 0.0
    return said.cost_per_hour + said.power_watts / 1000 * settings.electricity_per_kwh


def _node(kind: str, of_nodes: Sequence[Sequence[_Lease]]) -> NodeClass | None:
    """The mean of these nodes' throughputs; None where they took no time."""
    took = sorted(end - begin for leases in of_nodes for begin, _, end in leases)
    held_s = sum(busy_seconds((begin, end) for begin, _, end in leases) for leases in of_nodes)
    if not held_s:
        return None
    drawn_s = sum(len(leases) / rate for leases in of_nodes if (rate := busy_rate(leases)))
    rate = min(len(took) / drawn_s if drawn_s else math.inf, TRUSTED * len(took) / held_s)
    return NodeClass(name=kind, count=1, rollouts_per_s=rate, latency_s=quantile(took, SLOW) or 0.0)


def busy_rate(leases: Iterable[_Lease]) -> float:
    """Rollouts a second while the node had enough to do; 0 where none took any time."""
    changes: list[tuple[float, int, int, float]] = []
    """When; how many more are held, and drawn; how much faster it draws."""
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
    """Nodes with the same engine on the same device do the same."""
    if node_id == HUB_NODE_ID:
        return "the hub itself"
    kind = said.get(node_id)
    return f"{kind.backend} · {kind.device}" if kind else "unknown"


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total
