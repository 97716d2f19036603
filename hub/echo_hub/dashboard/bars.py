"""Horizontal bars on the Run page. Positions and lengths are thousandths of the whole bar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from echo_hub.dashboard.answers import IDLE
from echo_hub.dashboard.model import CapacityView, RunView, WorkView
from echo_shared.records.node import NodeMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BarSegment:
    """One part of a bar. `start` and `length` are in thousandths of the bar's length."""

    label: str
    kind: str
    value: float
    start: float
    length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsBar:
    """Bar for the token lengths of all completions with one outcome, on an axis that begins at 0."""

    outcome: str
    kind: str
    rollouts: int
    mean: float
    median: int
    longest: int
    start: float
    """Position on the axis, in thousandths of the bar, of the 10th percentile of the completions' lengths."""
    length: float
    """Distance from the 10th to the 90th percentile, in thousandths of the bar."""
    middle: float
    """Position on the axis, in thousandths of the bar, of the completions' median length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchBar:
    """Bar for one node's mismatch: the KL divergence between the token probabilities that the node reports and those of
    the learner. The bar of the largest mismatch has the full length."""

    node_id: str
    name: str
    kl: float
    num_tokens: int
    length: float


def accounting_segments(run: RunView) -> tuple[BarSegment, ...]:
    """Return a segment each for trained, evaluated, answered (delivered to tenants) and in-flight rollouts, then one
    for each drop reason, the largest first."""
    accounting = run.accounting
    parts: list[tuple[str, str, float]] = [("trained", "trained", accounting.trained)]
    parts += [("evaluated", "evaluated", accounting.evaluated)] if accounting.evaluated else []
    parts += [("answered", "answered", accounting.answered)] if accounting.answered else []
    parts += [("in flight", "flight", accounting.in_flight)]
    dropped = sorted(accounting.dropped.items(), key=lambda item: -item[1])
    parts += [(reason.replace("_", " "), f"drop-{reason}", number) for reason, number in dropped if number]
    return _segments(parts, whole=max(accounting.leased, 1))


def learner_time_segments(capacity: CapacityView | None) -> tuple[BarSegment, ...]:
    """Return a segment for the learner's training time, then one for each reason why it was idle."""
    if capacity is None:
        return ()
    parts: list[tuple[str, str, float]] = [("training", "trained", 1 - capacity.idle_share)]
    parts += [
        (label, f"idle-{reason}", share)
        for reason, label in IDLE.items()
        if (share := capacity.idle_by_reason.get(reason, 0.0))
    ]
    return _segments(parts, whole=1.0)


def staleness_bars(work: WorkView) -> tuple[BarSegment, ...]:
    """Return a bar for each staleness from 0 to the largest, including empty bars.

    The fullest bar has the full length.
    """
    groups = work.groups_by_staleness
    most = max(groups.values(), default=0)
    return tuple(
        BarSegment(
            label=str(age),
            kind="drop-stale",
            value=groups.get(age, 0),
            start=0.0,
            length=1000 * groups.get(age, 0) / most,
        )
        for age in range(max(groups, default=-1) + 1)
    )


def lengths_bars(work: WorkView) -> tuple[LengthsBar, ...]:
    """Return one bar for each outcome; the axis of all bars ends at the longest completion."""
    whole = max((of.longest for of in work.lengths), default=1) or 1
    return tuple(
        LengthsBar(
            outcome=of.outcome.replace("_", " "),
            kind={"trained": "trained", "in flight": "flight"}.get(of.outcome, f"drop-{of.outcome}"),
            rollouts=of.rollouts,
            mean=of.mean,
            median=round(of.p50),
            longest=of.longest,
            start=1000 * of.p10 / whole,
            length=1000 * (of.p90 - of.p10) / whole,
            middle=1000 * of.p50 / whole,
        )
        for of in work.lengths
    )


def mismatch_bars(mismatch: Iterable[NodeMismatch], names: Mapping[str, str]) -> tuple[MismatchBar, ...]:
    """Return one bar for each node. `names` maps ids of known nodes to names."""
    nodes = tuple(mismatch)
    most = max((node.kl for node in nodes), default=0.0) or 1.0
    return tuple(
        MismatchBar(
            node_id=node.node_id,
            name=names.get(node.node_id, ""),
            kl=node.kl,
            num_tokens=node.num_tokens,
            length=1000 * max(node.kl, 0.0) / most,
        )
        for node in nodes
    )


def _segments(parts: Iterable[tuple[str, str, float]], *, whole: float) -> tuple[BarSegment, ...]:
    segments, start = [], 0.0
    for label, kind, value in parts:
        length = 1000 * value / whole
        segments.append(BarSegment(label=label, kind=kind, value=value, start=start, length=length))
        start += length
    return tuple(segments)
