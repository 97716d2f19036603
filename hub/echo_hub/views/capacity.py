"""How busy the learner is: measured shares of time, the capacity model's expectation, and advice for more.

In a large fleet a reading takes a fraction of a second, so its result is cached for a few seconds and refreshed in the
background.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from echo_hub.config.sections import HubConfig
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.core.capacity.advice import (
    HUNDREDTH,
    NODES_TRIED,
    STABLE_STALENESS,
    Advice,
    advise,
    busy_share,
    by_shorter_leases,
    farthest_by_nodes,
    farthest_by_staleness,
    nodes_to_add,
    reaches,
    smallest_staleness,
)
from echo_hub.core.capacity.model import NodeClass, Pool, Prediction, Workload
from echo_hub.core.capacity.schedule import predict
from echo_hub.dashboard.model import AdvisedNodes, CapacityView
from echo_hub.store.store import Store
from echo_hub.views.beside import ReadBeside
from echo_hub.views.learner_time import learner_time
from echo_hub.views.pace import RunPace, kinds_of, newest_steps, read_pace

READ_EVERY_S: Final = 10.0

TARGET: Final = 0.98
"""Goal of the advice: the share of time in which the learner need not wait for nodes."""

USUAL_STALENESS: Final = TrainingConfig.model_fields["max_staleness"].default

KINDS_ADVISED: Final = 4
"""Number of kinds of nodes (engine and device) for which advice is given: the most numerous kinds."""

BATCHES_TRIED: Final = (2, 4, 8, 16, 32)
"""Factors by which larger batches are tried. With a larger batch, a step takes longer, so rollouts age by fewer
steps."""

KINDS_TRIED: Final = 2
"""Number of kinds for which the reachable utilisation is computed if no number of nodes suffices. The limit is needed
because each computation takes long."""


class CapacityViews:
    """Caches capacity views. `read` is thread-safe."""

    def __init__(self, *, store: Store, started_at: float) -> None:
        self._store = store
        self._started_at = started_at
        self._views = ReadBeside(self._view, every_s=READ_EVERY_S, name="capacity")

    def read(
        self, config: HubConfig, connected: Collection[str] | None, *, waits_for: str | None
    ) -> CapacityView | None:
        """Return the capacity view; None before the first step.

        `config` holds the current settings. `connected` are the nodes to count; None means all recently active ones.
        `waits_for` is the reason for which the learner waits now, one of `learner_time.REASONS`; None if it trains or
        has nothing left to do.
        """
        return self._views.newest(config, connected, waits_for)

    def _view(self, config: HubConfig, connected: Collection[str] | None, waits_for: str | None) -> CapacityView | None:
        steps = newest_steps(self._store)
        waits_since = (waits_for, steps[-1].trained_at, time.time()) if waits_for and steps else None
        spent = learner_time(steps, started_at=self._started_at, waits_since=waits_since)
        pace = read_pace(self._store, config, steps, connected)
        if spent is None or pace is None:
            return None
        expected, advice = expect(pace)
        return CapacityView(
            window_s=spent.window_s,
            idle_share=spent.idle_share,
            idle_by_reason=spent.idle,
            step_s=pace.workload.step_s,
            broadcast_s=pace.workload.broadcast_s,
            predicted_utilisation=expected.utilisation,
            rollouts_per_s=expected.rollouts_per_s,
            needed_per_s=expected.needed_per_s,
            missing_per_s=expected.missing_per_s,
            advised_nodes=tuple(AdvisedNodes(kind=name, count=count) for name, count in advice.added),
            advised_staleness=advice.max_staleness,
            advised_interval=advice.publish_every,
            verdict=verdict(pace.workload, pace.nodes, expected, advice),
        )


def expect(pace: RunPace, target: float = TARGET) -> tuple[Prediction, Advice]:
    """Return the model's prediction and advice for the measured workload and nodes."""
    return (
        predict(pace.workload, Pool.of(pace.nodes)),
        advise(pace.workload, pace.nodes, pace.kinds[:KINDS_ADVISED], target=target),
    )


def verdict(
    workload: Workload, nodes: Sequence[NodeClass], expected: Prediction, advice: Advice, target: float = TARGET
) -> str:
    """Say in a few sentences whether the learner waits, why, and what would help."""
    if not expected.rollouts_per_s:
        return "No node has returned enough rollouts recently for a prediction."
    if reaches(workload, Pool.of(nodes), target):
        spare = expected.rollouts_per_s / expected.needed_per_s - 1
        rest = f" The rest, {expected.idle:.0%}, is its own hand-off." if expected.idle >= 0.01 else ""
        more = f" The nodes could return {spare:.0%} more than the learner needs." if spare >= 0.01 else ""
        return f"The learner can train {expected.utilisation:.0%} of the time.{rest}{more}"
    why, what = _why(workload, nodes, expected), _what(workload, nodes, advice, target)
    return f"At this pace, the learner waits {_waits(workload, expected):.0%} of the time: {why} {what}"


def _waits(workload: Workload, expected: Prediction) -> float:
    return 1 - workload.step_s / expected.period_s


def _why(workload: Workload, nodes: Sequence[NodeClass], expected: Prediction) -> str:
    if expected.missing_per_s > 0.005 * expected.needed_per_s:
        slow = expected.needed_per_s / expected.rollouts_per_s
        times = f": {slow:.2g} times too slow" if slow >= 1.5 else ""
        return (
            f"it needs {expected.needed_per_s:.3g} rollouts/s, the nodes return {expected.rollouts_per_s:.3g}{times}."
        )
    if workload.mode != "async":
        return f"in {workload.mode} mode the learner always waits for rollouts of its newest version."
    if workload.publish_every * workload.step_s < workload.broadcast_s:
        apart_s = workload.publish_every * workload.step_s
        return (
            f"a version takes {workload.broadcast_s:.3g} s to reach the nodes, "
            f"and a new one comes every {apart_s:.3g} s."
        )
    late_s = workload.broadcast_s + max(node.latency_s for node in nodes)
    return (
        f"the nodes are fast enough, but their rollouts are too old for a staleness of {workload.max_staleness}: "
        f"version and slowest rollout take up to {late_s:.3g} s, a step {workload.step_s:.3g} s."
    )


def _what(workload: Workload, nodes: Sequence[NodeClass], advice: Advice, target: float) -> str:
    ways = [f"add {count} node{'s' * (count > 1)} like {name}" for name, count in advice.added if count]
    if advice.max_staleness is not None and advice.max_staleness > workload.max_staleness:
        ways.append(f"set training.max_staleness = {advice.max_staleness}")
    if advice.publish_every is not None and advice.publish_every != workload.publish_every:
        ways.append(f"set training.publish_every = {advice.publish_every}")
    said = ", or ".join(ways or _both(workload, nodes, target))
    if said:
        return f"{said[0].upper()}{said[1:]}."
    names = [name for name, _ in advice.added]
    kinds = [kind for kind in kinds_of(nodes) if kind.name in names][:KINDS_TRIED]
    if workload.mode == "sequential":
        freed, pool = replace(workload, mode="async", max_staleness=USUAL_STALENESS), Pool.of(nodes)
        could = f"it could train {predict(freed, pool).utilisation:.0%} of the time"
        number = nodes_to_add(freed, pool, kinds[0], target) if kinds else None
        more = f", and with {_more(number)} like {kinds[0].name} {target:.0%}" if number else ""
        return f"With a staleness of {USUAL_STALENESS}, in async mode, {could}{more}."
    if workload.mode == "colocated":
        return "In async mode, nodes would sample while it trains."
    return f"{_how_far(workload, nodes, kinds)}{_together(workload, nodes, kinds, target)}"


def _how_far(workload: Workload, nodes: Sequence[NodeClass], kinds: Sequence[NodeClass]) -> str:
    """Say how far each single change would raise the utilisation. Used if no single change is sufficient."""
    pool = Pool.of(nodes)
    ways: list[tuple[float, str]] = []
    for kind in kinds:
        found = farthest_by_nodes(workload, pool, kind)
        ways.append((found.busy, f"{_more(found.amount)} like {kind.name}"))
    if older := farthest_by_staleness(workload, pool):
        ways.append((older.busy, f"training.max_staleness = {older.amount}"))
    shorter = "leases half as long (a lower sampling.max_tokens, or nodes that hold fewer rollouts at once)"
    ways.append((by_shorter_leases(workload, pool), shorter))
    now = busy_share(workload, pool)
    useful = [f"{way} to {share:.0%}" for share, way in sorted(ways, reverse=True) if share >= now + HUNDREDTH]
    if not useful:
        return f"Neither more such nodes nor shorter leases get it beyond {now:.0%}: versions must arrive sooner."
    return f"No single change keeps it busy all of the time. From {now:.0%}, it could reach: {'; '.join(useful)}."


def _together(workload: Workload, nodes: Sequence[NodeClass], kinds: Sequence[NodeClass], target: float) -> str:
    """Suggest more nodes together with a larger staleness bound or larger batches, if no change is sufficient alone."""
    if workload.mode != "async" or not kinds:
        return ""
    pool = Pool.of(nodes)
    changes = [
        (replace(workload, max_staleness=bound), f"training.max_staleness = {bound}")
        for bound in range(workload.max_staleness + 1, STABLE_STALENESS + 1)
    ]
    for times in BATCHES_TRIED:
        rollouts, train_s = times * workload.rollouts_per_step, times * workload.train_s
        what = f"batches {times} times as large (training.group_size or training.groups_per_step)"
        changes.append((replace(workload, rollouts_per_step=rollouts, train_s=train_s), what))
    for changed, what in changes:
        if reaches(changed, pool.plus(replace(kinds[0], count=NODES_TRIED[-1])), target):
            number = nodes_to_add(changed, pool, kinds[0], target)
            if number:
                return f" {_more(number)} like {kinds[0].name} and {what} together are enough."
            if number == 0:
                return f" {what[0].upper()}{what[1:]} are enough."
    return ""


def _more(number: int) -> str:
    return f"{number:,} more node{'s' * (number != 1)}"


def _both(workload: Workload, nodes: Sequence[NodeClass], target: float) -> list[str]:
    """Suggest a longer publication interval together with a larger staleness bound, if neither is sufficient alone."""
    if workload.mode != "async":
        return []
    every = max(1, -int(-workload.broadcast_s // workload.step_s))
    bound = smallest_staleness(replace(workload, publish_every=every), Pool.of(nodes), target)
    if bound is None:
        return []
    return [f"set training.publish_every = {every} and training.max_staleness = {bound}"]
