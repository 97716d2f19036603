"""Makes `echo_shared.books` of the tables: counts of receipts, and of what nodes fetched. Reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any, Final

from sqlalchemy import Column, Connection, Row, Select, bindparam, distinct, func, select

from echo_hub.core.spread.holdings import quantile
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.store.at_once import rows_at_once
from echo_hub.store.tables import (
    checking,
    costs,
    evaluations,
    fetch_tallies,
    fetches,
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
    EVALUATED,
    TRAINED,
    TRANSPORTS,
    bytes_by_source,
    dropped_of,
    final_so_far,
)
from echo_shared.books import (
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
from echo_shared.messages import ReceiptState
from echo_shared.step_figures import figures_of

_IS_USEFUL: Final = tallies.c.outcome.in_((TRAINED, EVALUATED)) & (tallies.c.rollouts > 0)


@dataclass(frozen=True, slots=True)
class _OfNodes:
    """Rows that nodes have: of all, and of those that are `chosen`."""

    all: Select[Any]
    chosen: Select[Any]

    @classmethod
    def by(cls, key: Column[str], query: Select[Any]) -> _OfNodes:
        return cls(query, query.where(key.in_(bindparam("chosen", expanding=True))))


_KNOWN: Final = _OfNodes.by(
    nodes.c.node_id,
    select(nodes, invites.c.name.label("invite")).outerjoin(invites, invites.c.invite_id == nodes.c.invite_id),
)
_TALLIES: Final = _OfNodes.by(tallies.c.node_id, select(tallies))
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
_UNFINISHED: Final = (
    select(rollouts.c.node_id, rollouts.c.state, func.count().label("number"))
    .where(rollouts.c.state.in_((ReceiptState.LEASED, ReceiptState.RECEIVED, ReceiptState.SCORED)))
    .group_by(rollouts.c.state, rollouts.c.node_id)
)
_PUBLISHED: Final = select(versions).order_by(versions.c.policy_version.desc()).limit(bindparam("most"))
_FETCHED: Final = select(version_tallies).where(
    version_tallies.c.policy_version.in_(bindparam("wanted", expanding=True))
)
_LASTED: Final = select(fetches.c.policy_version, fetches.c.broadcast_s).where(
    fetches.c.policy_version.in_(bindparam("changed", expanding=True)), fetches.c.broadcast_s.is_not(None)
)
KEYS_A_QUERY: Final = 1_000
"""Far below what either database takes as parameters of one statement."""


def read_leaderboard(
    connection: Connection,
    *,
    most: int | None = None,
    always: Collection[str] = (),
    only: Collection[str] | None = None,
) -> list[NodeTotals]:
    """The node with most rollouts that were trained on or evaluated first. Every node; or `most` of them, those with
    most such rollouts and then those that were seen last, and the ones of `always`: strangers' keys cost nothing, so
    there may be any number in the books. Or no more than those of `only`."""
    if only is not None:
        chosen: set[str] | None = set(only)
    else:
        chosen = None if most is None else {*_foremost(connection, most), *always}
    final: dict[str, dict[str, Row[Any]]] = {}
    for row in _rows_of(connection, _TALLIES, chosen):
        final.setdefault(row.node_id, {})[row.outcome] = row
    under_way: dict[str, Counter[str]] = {}
    for node_id, state, number in _unfinished(connection):
        if chosen is None or node_id in chosen:
            under_way.setdefault(node_id, Counter())[state] = number
    known = {row.node_id: row for row in _rows_of(connection, _KNOWN, chosen)}
    paid = {row.node_id: row for row in _rows_of(connection, _COSTS, chosen)}
    checked = {row.node_id: row for row in _rows_of(connection, _CHECKING, chosen)}
    judged = {row.node_id: row for row in _rows_of(connection, _JUDGED, chosen)}
    useful = {
        node_id: sum(row.rollouts for outcome, row in of_node.items() if outcome in (TRAINED, EVALUATED))
        for node_id, of_node in final.items()
    }
    so_far = final_so_far(connection)
    total = so_far.get(TRAINED, 0) + so_far.get(EVALUATED, 0)
    rows = []
    for node_id in known.keys() | final.keys() | under_way.keys():
        of_node, states, node = final.get(node_id, {}), under_way.get(node_id, Counter()), known.get(node_id)
        standing = judged.get(node_id)
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
                invite=(node.invite or "") if node else "",
                cost_per_hour=node.cost_per_hour if node else 0.0,
                power_watts=node.power_watts if node else 0.0,
                cost=paid[node_id].dollars if node_id in paid else 0.0,
                active_s=paid[node_id].active_s if node_id in paid else 0.0,
                trained_rollouts=trained.rollouts if trained else 0,
                trained_tokens=trained.tokens if trained else 0,
                evaluated_rollouts=evaluated.rollouts if evaluated else 0,
                share=useful.get(node_id, 0) / max(total, 1),
                received=sum(row.received for row in of_node.values()) + states.total() - states[ReceiptState.LEASED],
                dropped=sum(row.rollouts for row in of_node.values()) - useful.get(node_id, 0),
                standing=standing.state if standing else "",
                standing_reason=standing.reason if standing else "",
                standing_since=standing.since if standing else 0.0,
                verified_in_a_row=standing.num_verified if standing else 0,
                others_checked=checked[node_id].rollouts if node_id in checked else 0,
                others_checked_tokens=checked[node_id].tokens if node_id in checked else 0,
                checks=standing.num_checked if standing else 0,
                failed_checks=standing.num_failed if standing else 0,
                last_checked=standing.checked_at if standing else None,
                precision=NumericsClass(*standing.numerics).precision if standing else "",
            )
        )
    return sorted(rows, key=lambda row: (-row.share, row.name, row.node_id))


def _foremost(connection: Connection, most: int) -> set[str]:
    """The database sorts; no more than these are ever here."""
    useful = func.sum(tallies.c.rollouts).desc()
    of_use = select(tallies.c.node_id).where(_IS_USEFUL).group_by(tallies.c.node_id)
    found = set(connection.scalars(of_use.order_by(useful, tallies.c.node_id).limit(most)))
    if len(found) < most:
        newest = select(nodes.c.node_id).order_by(nodes.c.last_seen.desc(), nodes.c.node_id).limit(most)
        others = (node_id for node_id in connection.scalars(newest) if node_id not in found)
        found.update(list(islice(others, most - len(found))))
    return found


def _rows_of(connection: Connection, of_nodes: _OfNodes, chosen: Collection[str] | None) -> Iterator[Row[Any]]:
    """Those of the chosen nodes; None = of all."""
    if chosen is None:
        yield from rows_at_once(connection, of_nodes.all)
        return
    keys = sorted(chosen)
    for start in range(0, len(keys), KEYS_A_QUERY):
        yield from rows_at_once(connection, of_nodes.chosen, {"chosen": keys[start : start + KEYS_A_QUERY]})


def read_num_nodes(connection: Connection) -> NumNodes:
    known = connection.scalar(select(func.count()).select_from(nodes)) or 0
    of_use = connection.scalar(select(func.count(distinct(tallies.c.node_id))).where(_IS_USEFUL)) or 0
    return NumNodes(known=known, useful=of_use)


def read_costs(connection: Connection) -> CostTotals:
    """What all nodes together have cost."""
    dollars, active_s = connection.execute(select(func.sum(costs.c.dollars), func.sum(costs.c.active_s))).one()
    return CostTotals(dollars=dollars or 0.0, active_s=active_s or 0.0)


def read_accounting(connection: Connection) -> Accounting:
    in_flight = sum(number for _, _, number in _unfinished(connection))
    final = final_so_far(connection)
    return Accounting(
        leased=in_flight + sum(final.values()),
        trained=final.get(TRAINED, 0),
        evaluated=final.get(EVALUATED, 0),
        dropped=dropped_of(final),
        in_flight=in_flight,
    )


def _unfinished(connection: Connection) -> Sequence[Sequence[Any]]:
    """Rollouts that are not final, by node and state, with their number; an index holds the states, so this is as fast
    as they are few."""
    return rows_at_once(connection, _UNFINISHED)


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


def read_steps(connection: Connection, since: int, limit: int) -> list[StepRecord]:
    """The first `limit` trained steps after step `since`, in order."""
    after = _TRAINED_STEPS.where(steps.c.step > since).order_by(steps.c.step).limit(limit)
    return [_step_record(row) for row in rows_at_once(connection, after)]


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
        components=row.components or {},
        staleness_mean=fmean(row.staleness),
        staleness_max=max(row.staleness),
        dropped=row.dropped or {},
        by_task={key: TaskFigures(**found) for key, found in (row.by_task or {}).items()},
        figures=figures_of(row.metrics, lasted_s=row.trained_at - row.planned_at),
    )


@dataclass(slots=True)
class Fetched:
    """What the fetches of one version come to. Each is written once, so all is as it was as long as their number is."""

    counts: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)


def read_published(connection: Connection, newest: int) -> Sequence[Row[Any]]:
    """The rows of the `newest` versions, in order."""
    return rows_at_once(connection, _PUBLISHED, {"most": newest})[::-1]


def read_fetched(connection: Connection, wanted: Sequence[int], known: Mapping[int, Fetched]) -> dict[int, Fetched]:
    """Of these versions their fetches. How long each took is read again only of those of which `known` has fewer."""
    found = {version: Fetched() for version in wanted}
    for row in rows_at_once(connection, _FETCHED, {"wanted": wanted}):
        of_version = found[row.policy_version]
        of_version.counts[row.transport] = row.fetches
        of_version.sizes.update(bytes_by_source(dict(row._mapping)))
    changed = []
    for version, fetched in found.items():
        if version in known and known[version].counts.total() == fetched.counts.total():
            fetched.seconds = known[version].seconds
        elif fetched.counts:
            changed.append(version)
    if changed:
        for row in rows_at_once(connection, _LASTED, {"changed": changed}):
            found[row.policy_version].seconds.append(row.broadcast_s)
    for version in changed:
        found[version].seconds.sort()
    return found


def version_records(published: Sequence[Row[Any]], fetched: Mapping[int, Fetched]) -> list[VersionRecord]:
    """In the order of the rows."""
    return [
        VersionRecord(
            policy_version=row.policy_version,
            published_at=row.published_at,
            payload_bytes=row.payload_bytes,
            carrier=row.carrier,
            way=row.way,
            **_arrived(row, fetched[row.policy_version].seconds),
            fetches_by_transport=dict(fetched[row.policy_version].counts),
            bytes_by_transport=dict(fetched[row.policy_version].sizes),
        )
        for row in published
    ]


def _arrived(row: Row[Any], seconds: Sequence[float]) -> dict[str, float | None]:
    """As written down when its rows went (`old_fetches`), or else from these."""
    written = {"p50": row.arrived_p50_s, "p95": row.arrived_p95_s, "max": row.arrived_max_s}
    shares = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {
        f"dissemination_{name}_s": quantile(seconds, share) if written[name] is None else written[name]
        for name, share in shares.items()
    }


def read_versions_by_transport(connection: Connection) -> dict[str, int]:
    """Fetches of policy versions over all nodes, by where most bytes came from; the base model is not counted."""
    known = {row.transport: row.fetches for row in connection.execute(select(fetch_tallies))}
    return {transport: known.get(transport, 0) for transport in TRANSPORTS}


def read_evaluations(connection: Connection, since: float) -> list[Evaluation]:
    """The evaluations made after `since`, in the order of versions, the run's own before those of its sets, greedy
    before sampled."""
    # Sorted here: asked for this order, SQLite walks all of them in it.
    rows = [
        row._mapping
        for table in (evaluations, set_evaluations)
        for row in connection.execute(select(table).where(table.c.evaluated_at > since))
    ]
    return [
        Evaluation(
            **{
                **row,
                "kind": EvaluationKind(row["kind"]),
                "pass_at": {int(k): share for k, share in row["pass_at"].items()},
                "components": row["components"] or {},
            }
        )
        for row in sorted(rows, key=lambda row: (row["policy_version"], row.get("name", ""), row["kind"]))
    ]
