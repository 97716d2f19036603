"""Build the records of `echo_shared.records.run` (figures of a run for its pages) from the tables. Reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Row,
    RowMapping,
    Select,
    bindparam,
    case,
    cast,
    distinct,
    func,
    select,
)

from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.store.at_once import rows_at_once
from echo_hub.store.old_fetches import arrived_s
from echo_hub.store.tables import (
    IS_UNFINISHED,
    checking,
    costs,
    evaluations,
    fetch_tallies,
    invites,
    nodes,
    rollouts,
    set_evaluations,
    steps,
    tallies,
    trust,
    version_tallies,
    versions,
)
from echo_hub.store.tallies import (
    ANSWERED,
    EVALUATED,
    TRAINED,
    TRANSPORTS,
    USEFUL,
    bytes_by_source,
    dropped_of,
    final_so_far,
)
from echo_shared.records.run import (
    Accounting,
    CostTotals,
    Evaluation,
    EvaluationKind,
    NodeTotals,
    NumNodes,
    StepRecord,
    TaskFigures,
    VersionRecord,
)
from echo_shared.records.step_figures import figures_of
from echo_shared.wire.messages import ReceiptState

_IS_USEFUL: Final = tallies.c.outcome.in_(USEFUL) & (tallies.c.rollouts > 0)


@dataclass(frozen=True, slots=True)
class _OfNodes:
    """A query over all nodes, and the same query for the node ids in the parameter `chosen`."""

    all: Select[Any]
    chosen: Select[Any]

    @classmethod
    def by(cls, key: Column[str], query: Select[Any]) -> _OfNodes:
        return cls(query, query.where(key.in_(bindparam("chosen", expanding=True))))


_KNOWN: Final = _OfNodes.by(
    nodes.c.node_id,
    select(nodes, invites.c.name.label("invite")).outerjoin(invites, invites.c.invite_id == nodes.c.invite_id),
)


def _sum(column: Column[int], outcomes: Sequence[str] = ()) -> ColumnElement[int]:
    counted = case((tallies.c.outcome.in_(outcomes), column), else_=0) if outcomes else column
    return cast(func.sum(counted), BigInteger)


_FINAL: Final = _OfNodes.by(
    tallies.c.node_id,
    select(
        tallies.c.node_id,
        _sum(tallies.c.rollouts).label("rollouts"),
        _sum(tallies.c.received).label("received"),
        _sum(tallies.c.rollouts, (TRAINED,)).label("trained"),
        _sum(tallies.c.tokens, (TRAINED,)).label("trained_tokens"),
        _sum(tallies.c.rollouts, (EVALUATED,)).label("evaluated"),
        _sum(tallies.c.rollouts, (ANSWERED,)).label("answered"),
        _sum(tallies.c.tokens, (ANSWERED,)).label("answered_tokens"),
    ).group_by(tallies.c.node_id),
)
_COSTS: Final = _OfNodes.by(costs.c.node_id, select(costs))
_CHECKING: Final = _OfNodes.by(checking.c.node_id, select(checking))
_JUDGED: Final = _OfNodes.by(
    trust.c.node_id,
    select(
        trust.c.node_id,
        trust.c.state,
        trust.c.numerics,
        trust.c.reason,
        trust.c.since,
        trust.c.num_verified,
        trust.c.num_checked,
        trust.c.num_failed,
        trust.c.checked_at,
    ),
)
_UNDER_WAY: Final = (
    select(rollouts.c.node_id, func.count().label("number"))
    .where(IS_UNFINISHED, rollouts.c.state != ReceiptState.LEASED)
    .group_by(rollouts.c.node_id)
)
_IN_FLIGHT: Final = select(func.count()).select_from(rollouts).where(IS_UNFINISHED)
_PUBLISHED: Final = select(versions).order_by(versions.c.policy_version.desc()).limit(bindparam("most"))
_FETCHED: Final = select(version_tallies).where(
    version_tallies.c.policy_version.in_(bindparam("wanted", expanding=True))
)
KEYS_A_QUERY: Final = 1_000
"""Number of keys in one query. This is far below the limit of parameters in both kinds of database."""


def read_leaderboard(
    connection: Connection,
    *,
    most: int | None = None,
    always: Collection[str] = (),
    only: Collection[str] | None = None,
) -> list[NodeTotals]:
    """Return nodes' totals; the node with the most useful rollouts (trained on, evaluated or answered) comes first.

    Without arguments, return every node. `most` limits the number, because anyone can make any number of node keys, and
    the database may hold as many nodes. The nodes with the most useful rollouts are chosen first, then those seen last.
    Nodes in `always` are added. If `only` is given, return just the nodes in it.
    """
    if only is not None:
        chosen: set[str] | None = set(only)
    else:
        chosen = None if most is None else {*_foremost(connection, most), *always}
    final = {row.node_id: row for row in _rows_of(connection, _FINAL, chosen)}
    under_way = read_under_way(connection)
    known = {row.node_id: row for row in _rows_of(connection, _KNOWN, chosen)}
    paid = {row.node_id: row for row in _rows_of(connection, _COSTS, chosen)}
    checked = {row.node_id: row for row in _rows_of(connection, _CHECKING, chosen)}
    judged = {row.node_id: row for row in _rows_of(connection, _JUDGED, chosen)}
    so_far = final_so_far(connection)
    total = max(sum(so_far.get(outcome, 0) for outcome in USEFUL), 1)
    at_work = under_way.keys() if chosen is None else under_way.keys() & chosen
    rows = [
        NodeTotals(
            node_id=node_id,
            **(_said(known[node_id]) if node_id in known else _UNKNOWN | {"name": node_id}),
            **(_did(final[node_id], total) if node_id in final else {}),
            **(_stands(judged[node_id]) if node_id in judged else {}),
            received=(final[node_id].received if node_id in final else 0) + under_way.get(node_id, 0),
            cost=paid[node_id].dollars if node_id in paid else 0.0,
            active_s=paid[node_id].active_s if node_id in paid else 0.0,
            others_checked=checked[node_id].rollouts if node_id in checked else 0,
            others_checked_tokens=checked[node_id].tokens if node_id in checked else 0,
        )
        for node_id in known.keys() | final.keys() | at_work
    ]
    return sorted(rows, key=lambda row: (-row.share, row.name, row.node_id))


def read_under_way(connection: Connection) -> dict[str, int]:
    """Return how many received rollouts of each node are not final yet. An index holds only these rows."""
    return {row.node_id: row.number for row in rows_at_once(connection, _UNDER_WAY)}


_UNKNOWN: Final = {"backend": "", "device": "", "first_seen": 0.0, "last_seen": 0.0}
"""Values for nodes without a row in `nodes`: the hub's own sampler, and nodes that joined before a database was
lost."""


def _said(node: Row[Any]) -> dict[str, Any]:
    return {
        "name": node.name,
        "backend": node.backend,
        "device": node.device,
        "first_seen": node.first_seen,
        "last_seen": node.last_seen,
        "banned_at": node.banned_at,
        "invite": node.invite or "",
        "cost_per_hour": node.cost_per_hour,
        "power_watts": node.power_watts,
    }


def _did(final: Row[Any], total: int) -> dict[str, Any]:
    useful = final.trained + final.evaluated + final.answered
    return {
        "trained_rollouts": final.trained,
        "trained_tokens": final.trained_tokens,
        "evaluated_rollouts": final.evaluated,
        "answered_rollouts": final.answered,
        "answered_tokens": final.answered_tokens,
        "share": useful / total,
        "dropped": final.rollouts - useful,
    }


def _stands(standing: Row[Any]) -> dict[str, Any]:
    return {
        "standing": standing.state,
        "standing_reason": standing.reason,
        "standing_since": standing.since,
        "verified_in_a_row": standing.num_verified,
        "checks": standing.num_checked,
        "failed_checks": standing.num_failed,
        "last_checked": standing.checked_at,
        "precision": NumericsClass(*standing.numerics).precision,
    }


def _foremost(connection: Connection, most: int) -> set[str]:
    """Return the ids of `most` nodes: those with the most useful rollouts, then those seen last. The database sorts, so
    at most `most` rows of each query are read.
    """
    useful = func.sum(tallies.c.rollouts).desc()
    of_use = select(tallies.c.node_id).where(_IS_USEFUL).group_by(tallies.c.node_id)
    found = set(connection.scalars(of_use.order_by(useful, tallies.c.node_id).limit(most)))
    if len(found) < most:
        newest = select(nodes.c.node_id).order_by(nodes.c.last_seen.desc(), nodes.c.node_id).limit(most)
        others = (node_id for node_id in connection.scalars(newest) if node_id not in found)
        found.update(list(islice(others, most - len(found))))
    return found


def _rows_of(connection: Connection, of_nodes: _OfNodes, chosen: Collection[str] | None) -> Iterator[Row[Any]]:
    if chosen is None:
        yield from rows_at_once(connection, of_nodes.all)
        return
    keys = sorted(chosen)
    for start in range(0, len(keys), KEYS_A_QUERY):
        yield from rows_at_once(connection, of_nodes.chosen, {"chosen": keys[start : start + KEYS_A_QUERY]})


def read_num_nodes(connection: Connection) -> NumNodes:
    """Return the number of nodes that ever joined, and of nodes with trained or evaluated rollouts."""
    known = connection.scalar(select(func.count()).select_from(nodes)) or 0
    of_use = connection.scalar(select(func.count(distinct(tallies.c.node_id))).where(_IS_USEFUL)) or 0
    return NumNodes(known=known, useful=of_use)


def read_costs(connection: Connection) -> CostTotals:
    dollars, active_s = connection.execute(select(func.sum(costs.c.dollars), func.sum(costs.c.active_s))).one()
    return CostTotals(dollars=dollars or 0.0, active_s=active_s or 0.0)


def read_accounting(connection: Connection) -> Accounting:
    in_flight = connection.scalar(_IN_FLIGHT) or 0
    final = final_so_far(connection)
    return Accounting(
        leased=in_flight + sum(final.values()),
        trained=final.get(TRAINED, 0),
        evaluated=final.get(EVALUATED, 0),
        answered=final.get(ANSWERED, 0),
        dropped=dropped_of(final),
        in_flight=in_flight,
    )


_TRAINED_STEPS: Final = select(
    steps.c.step,
    steps.c.planned_at,
    steps.c.trained_at,
    steps.c.num_groups,
    steps.c.num_rollouts,
    steps.c.num_tokens,
    steps.c.mean_reward,
    steps.c.components,
    steps.c.staleness,
    steps.c.metrics,
    steps.c.dropped,
    steps.c.by_task,
).where(steps.c.trained_at.is_not(None))


def read_steps(connection: Connection, since: int = 0, limit: int = 1_000) -> list[StepRecord]:
    after = _TRAINED_STEPS.where(steps.c.step > since).order_by(steps.c.step).limit(limit)
    return [_step_record(row) for row in rows_at_once(connection, after)]


def read_newest_step(connection: Connection) -> StepRecord | None:
    """Return the last trained step; None before the first."""
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
        components=row.components or {},
        staleness_mean=fmean(row.staleness),
        staleness_max=max(row.staleness),
        dropped=row.dropped or {},
        by_task={key: TaskFigures(**found) for key, found in (row.by_task or {}).items()},
        figures=figures_of(row.metrics, lasted_s=row.trained_at - row.planned_at),
    )


@dataclass(slots=True)
class FetchSummary:
    """Counts of one version's fetches by transport, and its arrival times. Fetches are only ever added, so an equal
    count means equal contents.
    """

    counts: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    arrived_s: Mapping[str, float | None] = field(default_factory=dict)


def read_published(connection: Connection, newest: int) -> Sequence[Row[Any]]:
    """Return the `versions` rows of the `newest` versions, oldest first."""
    return rows_at_once(connection, _PUBLISHED, {"most": newest})[::-1]


def read_fetched(
    connection: Connection, wanted: Sequence[int], known: Mapping[int, FetchSummary]
) -> dict[int, FetchSummary]:
    """Return the fetches of these versions. Arrival times are read again only for versions with more fetches than
    `known` has.
    """
    found = {version: FetchSummary() for version in wanted}
    for row in rows_at_once(connection, _FETCHED, {"wanted": wanted}):
        of_version = found[row.policy_version]
        of_version.counts[row.transport] = row.fetches
        of_version.sizes.update(bytes_by_source(dict(row._mapping)))
    for version, fetched in found.items():
        is_known = version in known and known[version].counts.total() == fetched.counts.total()
        fetched.arrived_s = known[version].arrived_s if is_known else arrived_s(connection, version)
    return found


def version_records(published: Sequence[Row[Any]], fetched: Mapping[int, FetchSummary]) -> list[VersionRecord]:
    return [
        VersionRecord(
            policy_version=row.policy_version,
            published_at=row.published_at,
            payload_bytes=row.payload_bytes,
            carrier=row.carrier,
            way=row.way,
            **_arrived(row, fetched[row.policy_version].arrived_s),
            fetches_by_transport=dict(fetched[row.policy_version].counts),
            bytes_by_transport=dict(fetched[row.policy_version].sizes),
        )
        for row in published
    ]


def _arrived(row: Row[Any], counted: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return a version's arrival times. Before the version's fetch rows were deleted, `old_fetches` wrote these times
    to its row. Without written times, return those just counted.
    """
    written = {"p50": row.arrived_p50_s, "p95": row.arrived_p95_s, "max": row.arrived_max_s}
    is_written = row.arrived_max_s is not None
    return {f"dissemination_{name}_s": (written if is_written else counted).get(name) for name in written}


def read_versions_by_transport(connection: Connection) -> dict[str, int]:
    """Return the number of fetched policy versions by the transport that brought most bytes, over all nodes. Fetches of
    the base model are not counted.
    """
    known = {row.transport: row.fetches for row in connection.execute(select(fetch_tallies))}
    return {transport: known.get(transport, 0) for transport in TRANSPORTS}


def read_evaluations(connection: Connection, since: float = 0.0) -> list[Evaluation]:
    """Return the evaluations made after `since`, ordered by version.

    Within a version, the run's overall evaluation precedes those of single sets, and greedy precedes sampled.
    """
    # Sort here: with ORDER BY, SQLite would scan the whole table in that order.
    rows = [
        row._mapping
        for table in (evaluations, set_evaluations)
        for row in connection.execute(select(table).where(table.c.evaluated_at > since))
    ]
    rows.sort(key=lambda row: (row["policy_version"], row.get("name", ""), row["kind"]))
    return [_evaluation(row) for row in rows]


def read_evaluations_of(connection: Connection, policy_version: int) -> list[Evaluation]:
    """Return a version's evaluations on the whole held-out set, greedy before sampled."""
    of_version = select(evaluations).where(evaluations.c.policy_version == policy_version)
    return [_evaluation(row._mapping) for row in connection.execute(of_version.order_by(evaluations.c.kind))]


def _evaluation(row: RowMapping) -> Evaluation:
    return Evaluation(
        **{
            **row,
            "kind": EvaluationKind(row["kind"]),
            "pass_at": {int(k): share for k, share in row["pass_at"].items()},
            "components": row["components"] or {},
        }
    )


def read_evaluated_versions(connection: Connection) -> set[int]:
    return {
        version
        for table in (evaluations, set_evaluations)
        for version in connection.scalars(select(table.c.policy_version).distinct())
    }
