"""What the pages show, counted from receipts and from what nodes fetched. Reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any, Final

from sqlalchemy import Connection, Row, func, select

from echo_hub.store.tables import evaluations, fetch_tallies, fetches, nodes, rollouts, steps, tallies, versions
from echo_hub.store.tallies import (
    EVALUATED,
    TRAINED,
    TRANSPORTS,
    Source,
    Transport,
    bytes_by_source,
    dropped_so_far,
    main_transport,
)
from echo_shared.messages import DropReason, ReceiptState


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTotals:
    """One node that ever joined or was leased to. `name`, `backend` and `device` are what it says of itself."""

    node_id: str
    name: str
    backend: str
    device: str
    first_seen: float
    last_seen: float
    banned_at: float | None
    """None = it may take part."""
    trained_rollouts: int
    trained_tokens: int
    evaluated_rollouts: int
    share: float
    """Of all rollouts that were trained on or evaluated; 0..1."""
    received: int
    """Rollouts that came in, whatever became of them."""
    dropped: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Where every rollout ever leased is now."""

    by_state: Mapping[ReceiptState, int]
    by_drop_reason: Mapping[DropReason, int]

    @property
    def leased(self) -> int:
        """All that were ever leased."""
        return sum(self.by_state.values())

    @property
    def trained(self) -> int:
        return self.by_state.get(ReceiptState.TRAINED, 0)

    @property
    def evaluated(self) -> int:
        return self.by_state.get(ReceiptState.EVALUATED, 0)

    @property
    def dropped(self) -> int:
        return sum(self.by_drop_reason.values())

    @property
    def in_flight(self) -> int:
        return sum(
            self.by_state.get(state, 0) for state in (ReceiptState.LEASED, ReceiptState.RECEIVED, ReceiptState.SCORED)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One trained step."""

    step: int
    planned_at: float
    trained_at: float
    num_groups: int
    num_rollouts: int
    num_tokens: int
    """Of the completions."""
    mean_reward: float
    staleness_mean: float
    """Over groups."""
    staleness_max: int
    metrics: Mapping[str, float]
    """The learner's, and the hub's eval_s unless the hub died before it counted the step."""
    dropped: Mapping[str, int]
    """Rollouts dropped before the step was trained, from the first day on, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One published version, and how it reached the nodes."""

    policy_version: int
    published_at: float
    fetches_by_transport: Mapping[Transport, int]
    """One for each node that has it, by where most bytes came from."""
    bytes_by_source: Mapping[Source, int]
    broadcast_seconds: tuple[float, ...]
    """From the announcement until each node that was there had it, ascending."""
    payload_bytes: int | None
    """What travelled; None when it is not known, as are the next two."""
    carrier: str | None
    """keyframe or delta."""
    way: str | None


class EvaluationKind(StrEnum):
    GREEDY = "greedy"
    """The most likely completion, token by token."""
    SAMPLED = "sampled"
    """Several at the run's temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How one version does on the held-out problems, all completions by exactly this version."""

    policy_version: int
    kind: EvaluationKind
    num_problems: int
    """Those with a scored completion."""
    samples: int
    """Completions of each problem."""
    num_unscored: int
    """Completions on which the scorer failed; they count in no mean."""
    accuracy: float
    """The share of a problem's completions that solve it, mean over problems: mean@k."""
    accuracy_error: float
    """Its standard error."""
    pass_at: Mapping[int, float]
    """k -> the probability that one of k completions solves a problem, for k = 2, 4, ... and `samples`."""
    mean_reward: float
    mean_tokens: float
    """Drawn tokens of a completion, over all turns."""
    share_truncated: float
    """Of the completions: cut off by length in their last turn."""
    seconds: float
    """Of the sampling engine's time; by nodes, from the first lease to the last completion."""
    evaluated_at: float

    @property
    def text(self) -> str:
        """greedy 92.4% ± 1.2%; of several samples mean@8 91.0% ± 1.0%, pass@8 97.1%"""
        sampled = self.kind is EvaluationKind.SAMPLED
        name = f"mean@{self.samples}" if sampled else "greedy"
        known = f"{name} {self.accuracy:.1%} ± {self.accuracy_error:.1%}"
        return known + "".join(f", pass@{k} {share:.1%}" for k, share in self.pass_at.items() if k == self.samples)


def read_leaderboard(connection: Connection) -> list[NodeTotals]:
    """Most rollouts that were trained on or evaluated first."""
    final: dict[str, dict[str, Row[Any]]] = {}
    for row in connection.execute(select(tallies)):
        final.setdefault(row.node_id, {})[row.outcome] = row
    under_way: dict[str, Counter[str]] = {}
    for row in _unfinished(connection):
        under_way.setdefault(row.node_id, Counter())[row.state] = row.number
    known = {row.node_id: row for row in connection.execute(select(nodes))}
    useful = {
        node_id: sum(row.rollouts for outcome, row in of_node.items() if outcome in (TRAINED, EVALUATED))
        for node_id, of_node in final.items()
    }
    total = sum(useful.values())
    rows = []
    for node_id in known.keys() | final.keys() | under_way.keys():
        of_node, states, node = final.get(node_id, {}), under_way.get(node_id, Counter()), known.get(node_id)
        trained, evaluated = of_node.get(TRAINED), of_node.get(EVALUATED)
        rows.append(
            NodeTotals(
                node_id=node_id,
                name=node.name if node else node_id,
                backend=node.backend if node else "",
                device=node.device if node else "",
                first_seen=node.first_seen if node else 0.0,
                last_seen=node.last_seen if node else 0.0,
                banned_at=node.banned_at if node else None,
                trained_rollouts=trained.rollouts if trained else 0,
                trained_tokens=trained.tokens if trained else 0,
                evaluated_rollouts=evaluated.rollouts if evaluated else 0,
                share=useful.get(node_id, 0) / max(total, 1),
                received=sum(row.received for row in of_node.values()) + states.total() - states[ReceiptState.LEASED],
                dropped=sum(row.rollouts for row in of_node.values()) - useful.get(node_id, 0),
                in_flight=states.total(),
            )
        )
    return sorted(rows, key=lambda row: (-row.share, row.name, row.node_id))


def read_accounting(connection: Connection) -> Accounting:
    by_state: Counter[ReceiptState] = Counter()
    for row in _unfinished(connection):
        by_state[ReceiptState(row.state)] += row.number
    useful = connection.execute(
        select(tallies.c.outcome, func.sum(tallies.c.rollouts).label("number"))
        .where(tallies.c.outcome.in_((TRAINED, EVALUATED)))
        .group_by(tallies.c.outcome)
    )
    dropped = {DropReason(reason): number for reason, number in dropped_so_far(connection).items()}
    by_state.update({ReceiptState(row.outcome): int(row.number) for row in useful})
    by_state[ReceiptState.DROPPED] = sum(dropped.values())
    return Accounting(by_state=+by_state, by_drop_reason=dropped)


def _unfinished(connection: Connection) -> Sequence[Row[Any]]:
    """Rollouts that are not final, by node and state; an index holds the states, so this is as fast as they are few."""
    return connection.execute(
        select(rollouts.c.node_id, rollouts.c.state, func.count().label("number"))
        .where(rollouts.c.state.in_((ReceiptState.LEASED, ReceiptState.RECEIVED, ReceiptState.SCORED)))
        .group_by(rollouts.c.state, rollouts.c.node_id)
    ).all()


_TRAINED_STEPS: Final = select(
    steps.c.step,
    steps.c.planned_at,
    steps.c.trained_at,
    steps.c.num_groups,
    steps.c.num_rollouts,
    steps.c.num_tokens,
    steps.c.mean_reward,
    steps.c.staleness,
    steps.c.metrics,
    steps.c.dropped,
).where(steps.c.trained_at.is_not(None))


def read_steps(connection: Connection, since: int, limit: int) -> list[StepRecord]:
    """The first `limit` trained steps after step `since`, in order."""
    after = _TRAINED_STEPS.where(steps.c.step > since).order_by(steps.c.step).limit(limit)
    return [_step_record(row) for row in connection.execute(after)]


def read_newest_step(connection: Connection) -> StepRecord | None:
    """The last trained step; None before the first."""
    row = connection.execute(_TRAINED_STEPS.order_by(steps.c.step.desc()).limit(1)).one_or_none()
    return None if row is None else _step_record(row)


def _step_record(row: Any) -> StepRecord:
    return StepRecord(
        step=row.step,
        planned_at=row.planned_at,
        trained_at=row.trained_at,
        num_groups=row.num_groups,
        num_rollouts=row.num_rollouts,
        num_tokens=row.num_tokens,
        mean_reward=row.mean_reward,
        staleness_mean=fmean(row.staleness),
        staleness_max=max(row.staleness),
        metrics=row.metrics,
        dropped=row.dropped or {},
    )


def read_versions(connection: Connection, newest: int) -> list[VersionRecord]:
    """The `newest` versions, in order; fetches of older ones are not read."""
    published = connection.execute(select(versions).order_by(versions.c.policy_version.desc()).limit(newest)).all()
    counts: dict[int, Counter[Transport]] = {}
    sizes: dict[int, Counter[Source]] = {}
    seconds: dict[int, list[float]] = {}
    for row in connection.execute(
        select(fetches).where(fetches.c.policy_version.in_([row.policy_version for row in published]))
    ):
        fetched = bytes_by_source(dict(row._mapping))
        counts.setdefault(row.policy_version, Counter())[main_transport(fetched)] += 1
        sizes.setdefault(row.policy_version, Counter()).update(fetched)
        if row.broadcast_s is not None:
            seconds.setdefault(row.policy_version, []).append(row.broadcast_s)
    return [
        VersionRecord(
            policy_version=row.policy_version,
            published_at=row.published_at,
            fetches_by_transport=counts.get(row.policy_version, {}),
            bytes_by_source=sizes.get(row.policy_version, {}),
            broadcast_seconds=tuple(sorted(seconds.get(row.policy_version, ()))),
            payload_bytes=row.payload_bytes,
            carrier=row.carrier,
            way=row.way,
        )
        for row in reversed(published)
    ]


def read_versions_by_transport(connection: Connection) -> dict[Transport, int]:
    """Fetches of policy versions over all nodes, by where most bytes came from; the base model is not counted."""
    known = {row.transport: row.fetches for row in connection.execute(select(fetch_tallies))}
    return {transport: known.get(transport, 0) for transport in TRANSPORTS}


def read_evaluations(connection: Connection, since: float) -> list[Evaluation]:
    """Those made after `since`, in the order of versions, greedy before sampled."""
    # Sorted here: asked for this order, SQLite walks all of them in it.
    rows = connection.execute(select(evaluations).where(evaluations.c.evaluated_at > since))
    return [
        Evaluation(
            **{
                **row._mapping,
                "kind": EvaluationKind(row.kind),
                "pass_at": {int(k): share for k, share in row.pass_at.items()},
            }
        )
        for row in sorted(rows, key=lambda row: (row.policy_version, row.kind))
    ]
