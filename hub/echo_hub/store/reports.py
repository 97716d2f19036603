"""What the pages show, counted from receipts and from what nodes fetched. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from sqlalchemy import Connection, case, func, select

from echo_hub.store.tables import evaluations, fetches, nodes, rollouts, steps, versions
from echo_shared.messages import DropReason, ReceiptState

Transport = Literal["swarm", "web_seed"]

_TRANSPORT = case((fetches.c.swarm_bytes >= fetches.c.web_seed_bytes, "swarm"), else_="web_seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTotals:
    """One node that ever joined or was leased to. `name`, `backend` and `device` are what it says of itself."""

    node_id: str
    name: str
    backend: str
    device: str
    first_seen: float
    last_seen: float
    trained_rollouts: int
    trained_tokens: int
    share: float
    """Of all trained rollouts; 0..1."""
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
    def dropped(self) -> int:
        return sum(self.by_drop_reason.values())

    @property
    def in_flight(self) -> int:
        return sum(
            self.by_state.get(state, 0) for state in (ReceiptState.LEASED, ReceiptState.RECEIVED, ReceiptState.VERIFIED)
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
    """The learner's; empty when the hub died before it heard of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One published version, and how it reached the nodes."""

    policy_version: int
    published_at: float
    fetches_by_transport: Mapping[Transport, int]
    """One for each node that has it, by where most bytes came from."""
    bytes_by_transport: Mapping[Transport, int]
    fetch_seconds: tuple[float, ...]
    """Of each of these fetches, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Greedy accuracy on the held-out problems."""

    policy_version: int
    accuracy: float
    num_problems: int
    evaluated_at: float


def read_leaderboard(connection: Connection) -> list[NodeTotals]:
    """Most trained rollouts first."""
    tallies: dict[str, dict[str, tuple[int, int, int]]] = {}
    for row in connection.execute(
        select(
            rollouts.c.node_id,
            rollouts.c.state,
            func.count().label("count"),
            func.count(rollouts.c.num_tokens).label("received"),
            func.coalesce(func.sum(rollouts.c.num_tokens), 0).label("tokens"),
        ).group_by(rollouts.c.node_id, rollouts.c.state)
    ):
        tallies.setdefault(row.node_id, {})[row.state] = (row._mapping["count"], int(row.received), int(row.tokens))
    known = {row.node_id: row for row in connection.execute(select(nodes))}
    none = (0, 0, 0)
    trained = {node_id: by_state.get(ReceiptState.TRAINED, none) for node_id, by_state in tallies.items()}
    total = sum(count for count, _, _ in trained.values())
    rows = []
    for node_id in known.keys() | tallies.keys():
        by_state, node = tallies.get(node_id, {}), known.get(node_id)
        count, _, tokens = trained.get(node_id, none)
        dropped = by_state.get(ReceiptState.DROPPED, none)[0]
        rows.append(
            NodeTotals(
                node_id=node_id,
                name=node.name if node else node_id,
                backend=node.backend if node else "",
                device=node.device if node else "",
                first_seen=node.first_seen if node else 0.0,
                last_seen=node.last_seen if node else 0.0,
                trained_rollouts=count,
                trained_tokens=tokens,
                share=count / total if total else 0.0,
                received=sum(received for _, received, _ in by_state.values()),
                dropped=dropped,
                in_flight=sum(tally[0] for tally in by_state.values()) - count - dropped,
            )
        )
    return sorted(rows, key=lambda row: (-row.trained_rollouts, row.name, row.node_id))


def read_accounting(connection: Connection) -> Accounting:
    rows = connection.execute(
        select(rollouts.c.state, rollouts.c.drop_reason, func.count().label("number")).group_by(
            rollouts.c.state, rollouts.c.drop_reason
        )
    ).all()
    by_state: dict[ReceiptState, int] = {}
    for row in rows:
        by_state[ReceiptState(row.state)] = by_state.get(ReceiptState(row.state), 0) + row.number
    return Accounting(
        by_state=by_state,
        by_drop_reason={DropReason(row.drop_reason): row.number for row in rows if row.drop_reason is not None},
    )


def read_steps(connection: Connection, since: int, limit: int) -> list[StepRecord]:
    """The first `limit` trained steps after step `since`, in order."""
    columns = (
        steps.c.step,
        steps.c.planned_at,
        steps.c.trained_at,
        steps.c.num_groups,
        steps.c.num_rollouts,
        steps.c.num_tokens,
        steps.c.mean_reward,
        steps.c.staleness,
        steps.c.metrics,
    )
    rows = connection.execute(
        select(*columns)
        .where(steps.c.step > since, steps.c.trained_at.is_not(None))
        .order_by(steps.c.step)
        .limit(limit)
    )
    return [
        StepRecord(
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
        )
        for row in rows
    ]


def read_versions(connection: Connection, newest: int) -> list[VersionRecord]:
    """The `newest` versions, in order; fetches of older ones are not read."""
    published = connection.execute(select(versions).order_by(versions.c.policy_version.desc()).limit(newest)).all()
    counts: dict[int, dict[Transport, int]] = {}
    sizes: dict[int, dict[Transport, int]] = {}
    seconds: dict[int, list[float]] = {}
    for row in connection.execute(
        select(
            fetches.c.policy_version,
            _TRANSPORT.label("transport"),
            fetches.c.seconds,
            fetches.c.swarm_bytes,
            fetches.c.web_seed_bytes,
        ).where(fetches.c.policy_version.in_([row.policy_version for row in published]))
    ):
        count = counts.setdefault(row.policy_version, {})
        count[row.transport] = count.get(row.transport, 0) + 1
        size = sizes.setdefault(row.policy_version, {"swarm": 0, "web_seed": 0})
        size["swarm"] += row.swarm_bytes
        size["web_seed"] += row.web_seed_bytes
        seconds.setdefault(row.policy_version, []).append(row.seconds)
    return [
        VersionRecord(
            policy_version=row.policy_version,
            published_at=row.published_at,
            fetches_by_transport=counts.get(row.policy_version, {}),
            bytes_by_transport=sizes.get(row.policy_version, {}),
            fetch_seconds=tuple(sorted(seconds.get(row.policy_version, ()))),
        )
        for row in reversed(published)
    ]


def read_versions_by_transport(connection: Connection) -> dict[Transport, int]:
    """Fetches of policy versions over all nodes, by where most bytes came from; the base model is not counted."""
    rows = connection.execute(
        select(_TRANSPORT.label("transport"), func.count().label("number"))
        .where(fetches.c.policy_version.is_not(None))
        .group_by(_TRANSPORT)
    )
    found: dict[Transport, int] = {"swarm": 0, "web_seed": 0}
    for row in rows:
        found[row.transport] = row.number
    return found


def read_evaluations(connection: Connection) -> list[Evaluation]:
    """In the order of versions."""
    rows = connection.execute(select(evaluations).order_by(evaluations.c.policy_version))
    return [
        Evaluation(
            policy_version=row.policy_version,
            accuracy=row.accuracy,
            num_problems=row.num_problems,
            evaluated_at=row.evaluated_at,
        )
        for row in rows
    ]
