"""Running totals of facts that never change again: rollouts in a final state, and fetches.

The transaction that makes a rollout final (trained on, evaluated, answered or dropped) also updates the totals. So
totals always agree with receipts, and pages need not count the run's history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal, get_args

from sqlalchemy import Connection, Table, bindparam, func, select
from sqlalchemy.dialects import postgresql, sqlite

from echo_hub.core.accounting.effects import NodeCost
from echo_hub.store.at_once import rows_at_once
from echo_hub.store.bulk import among, execute_many
from echo_hub.store.tables import (
    WITH_PAYLOAD,
    checking,
    costs,
    fetch_tallies,
    outcome_tallies,
    payloads,
    rollouts,
    tallies,
    version_tallies,
)
from echo_shared.wire.messages import DropReason, ReceiptState

Transport = Literal["swarm", "web_seed", "shared_memory", "inline", "broadcast"]
TRANSPORTS: Final[tuple[Transport, ...]] = get_args(Transport)

Source = Literal["swarm", "web_seed", "shared_memory", "pushed", "mesh"]
"""Origin of a fetch's bytes. "pushed" bytes came from the hub over the node's connection, "mesh" bytes were forwarded
by other nodes.
"""
SOURCES: Final[tuple[Source, ...]] = get_args(Source)

TRAINED: Final = ReceiptState.TRAINED.value
EVALUATED: Final = ReceiptState.EVALUATED.value
ANSWERED: Final = ReceiptState.ANSWERED.value
USEFUL: Final = (TRAINED, EVALUATED, ANSWERED)
"""Outcomes of final rollouts that were of use, and so earn credit. All other outcomes are values of DropReason."""

_BY_OUTCOME: Final = select(outcome_tallies)
_COUNTED: Final = ("rollouts", "received", "tokens")
_OF_LEASES: Final = (
    select(rollouts.c.lease_id, rollouts.c.index, rollouts.c.node_id, rollouts.c.num_tokens, payloads.c.spans)
    .join_from(rollouts, payloads, WITH_PAYLOAD, isouter=True)
    .where(rollouts.c.lease_id.in_(bindparam("leases", expanding=True)))
)
_COUNT: Final = select(
    rollouts.c.node_id,
    func.count(),
    func.count(rollouts.c.num_tokens),
    func.coalesce(func.sum(rollouts.c.num_tokens), 0),
).group_by(rollouts.c.node_id)
LEASES_A_QUERY: Final = 64
"""Number of leases in one query; each lease holds at most a group's rollouts. Such a query takes a few milliseconds."""


def tally(connection: Connection, keys: Collection[tuple[int, int]], outcome: str) -> Mapping[str, Mapping[str, int]]:
    """Add rollouts that have just become final, given as (lease, index), to the totals. Return the added counts by
    node.

    `outcome` is one of `USEFUL` or a drop reason. A rollout counts for the node that held its lease; its tokens
    count for the nodes that sampled them. The payloads must still be stored.
    """
    by_node: dict[str, dict[str, int]] = {}
    for node_id, num_tokens, spans in _rows_of(connection, keys):
        counts = by_node.get(node_id) or by_node.setdefault(node_id, dict.fromkeys(_COUNTED, 0))
        counts["rollouts"] += 1
        counts["received"] += num_tokens is not None
        for drawer, _, count in spans or [(node_id, None, num_tokens or 0)]:
            drawn = by_node.get(drawer) or by_node.setdefault(drawer, dict.fromkeys(_COUNTED, 0))
            drawn["tokens"] += count
    _add_tallies(connection, by_node, outcome)
    return by_node


def tally_leases(
    connection: Connection, lease_ids: Sequence[int], drawn_by_several: Collection[tuple[int, int]], outcome: str
) -> Mapping[str, Mapping[str, int]]:
    """Like `tally`, add to the totals, but for all rollouts of these leases in the final state `outcome`, and count
    inside the database.

    `drawn_by_several` lists the rollouts, as (lease, index), whose tokens several nodes sampled.
    """
    of_these = among(connection, rollouts.c.lease_id, lease_ids), rollouts.c.state == outcome
    by_node = {
        node_id: dict(zip(_COUNTED, map(int, counts), strict=True))
        for node_id, *counts in connection.execute(_COUNT.where(*of_these))
    }
    for node_id, num_tokens, spans in _rows_of(connection, drawn_by_several):
        by_node[node_id]["tokens"] -= num_tokens or 0
        for drawer, _, count in spans:
            by_node.setdefault(drawer, dict.fromkeys(_COUNTED, 0))["tokens"] += count
    _add_tallies(connection, by_node, outcome)
    return by_node


def _rows_of(connection: Connection, keys: Collection[tuple[int, int]]) -> Iterator[tuple[str, int | None, Any]]:
    wanted = set(keys)
    leases = sorted({lease_id for lease_id, _ in wanted})
    for start in range(0, len(leases), LEASES_A_QUERY):
        # Query by lease alone: for (lease, index) pairs, SQLite would scan every rollout of the run.
        found = rows_at_once(connection, _OF_LEASES, {"leases": leases[start : start + LEASES_A_QUERY]})
        for lease_id, at, node_id, num_tokens, spans in map(tuple, found):
            if (lease_id, at) in wanted:
                yield node_id, num_tokens, spans


def _add_tallies(connection: Connection, by_node: Mapping[str, Mapping[str, int]], outcome: str) -> None:
    add_to(
        connection, tallies, [{"node_id": node_id, "outcome": outcome} for node_id in by_node], list(by_node.values())
    )
    if of_all := sum(counts["rollouts"] for counts in by_node.values()):
        add_to(connection, outcome_tallies, [{"outcome": outcome}], [{"rollouts": of_all}])


def tally_fetches(connection: Connection, fetched: Iterable[tuple[int, Mapping[Source, int]]]) -> None:
    """Add fetched policy versions to the totals. Each fetch counts for the transport that brought most of its bytes."""
    by_key: dict[tuple[int, Transport], Counter[str]] = {}
    for policy_version, sizes in fetched:
        of_key = by_key.setdefault((policy_version, main_transport(sizes)), Counter())
        of_key.update(fetches=1, **{f"{source}_bytes": size for source, size in sizes.items()})
    of_all: Counter[str] = Counter()
    for (_, transport), counts in by_key.items():
        of_all[transport] += counts["fetches"]
    add_to(
        connection,
        fetch_tallies,
        [{"transport": transport} for transport in of_all],
        [{"fetches": number} for number in of_all.values()],
    )
    keys = [{"policy_version": version, "transport": transport} for version, transport in by_key]
    add_to(connection, version_tallies, keys, list(by_key.values()))


def tally_costs(connection: Connection, accrued: Iterable[NodeCost]) -> None:
    by_node: dict[str, dict[str, float]] = {}
    for cost in accrued:
        of_node = by_node.setdefault(cost.node_id, {"active_s": 0.0, "dollars": 0.0})
        of_node["active_s"] += cost.active_s
        of_node["dollars"] += cost.dollars
    add_to(connection, costs, [{"node_id": node_id} for node_id in by_node], list(by_node.values()))


def tally_checking(connection: Connection, credited: Iterable[tuple[str, int]]) -> None:
    """Add rollouts and tokens that nodes recomputed to check other nodes. They count in the totals of the checking
    nodes."""
    by_node: dict[str, Counter[str]] = {}
    for node_id, num_tokens in credited:
        by_node.setdefault(node_id, Counter()).update(rollouts=1, tokens=num_tokens)
    add_to(connection, checking, [{"node_id": node_id} for node_id in by_node], list(by_node.values()))


def read_useful_nodes(connection: Connection) -> frozenset[str]:
    """Return the nodes that sampled tokens which were trained on, evaluated or delivered to tenants."""
    counted = select(tallies.c.node_id).where(tallies.c.outcome.in_(USEFUL), tallies.c.tokens > 0)
    return frozenset(connection.scalars(counted))


def final_so_far(connection: Connection) -> dict[str, int]:
    """Return the number of final rollouts, by outcome, over the whole run."""
    return {row.outcome: row.rollouts for row in rows_at_once(connection, _BY_OUTCOME)}


def dropped_of(final: Mapping[str, int]) -> dict[str, int]:
    """Return the dropped rollouts in the result of `final_so_far`, by reason."""
    return {DropReason(name).value: number for name, number in final.items() if name not in USEFUL}


def bytes_by_source(fetch: Mapping[str, Any]) -> dict[Source, int]:
    return {source: fetch[f"{source}_bytes"] for source in SOURCES}


def main_transport(fetched: Mapping[Source, int]) -> Transport:
    """Return the transport that brought most of a fetch's bytes.

    If any bytes came through shared memory, all did. Pushed and mesh bytes are summed; the sum counts as "broadcast" if
    other nodes forwarded any bytes, else as "inline".
    """
    if fetched["shared_memory"] > 0:
        return "shared_memory"
    sent = fetched["pushed"] + fetched["mesh"]
    if sent > max(fetched["swarm"], fetched["web_seed"]):
        return "broadcast" if fetched["mesh"] else "inline"
    return "swarm" if fetched["swarm"] >= fetched["web_seed"] else "web_seed"


def add_to(
    connection: Connection, table: Table, keys: Sequence[Mapping[str, str | int]], added: Sequence[Mapping[str, float]]
) -> None:
    """Add values to the row of each key; a missing row starts at zero.

    One upsert statement serves any number of keys.
    """
    if not keys:
        return
    statement = _adding(table, dialect_of(connection), tuple(keys[0]), tuple(added[0]))
    execute_many(connection, statement, [{**key, **more} for key, more in zip(keys, added, strict=True)])


@cache
def _adding(table: Table, dialect: Any, keys: tuple[str, ...], added: tuple[str, ...]) -> Any:
    fresh = dialect.insert(table)
    sums = {name: table.c[name] + fresh.excluded[name] for name in added}
    return fresh.on_conflict_do_update(index_elements=list(keys), set_=sums)


def dialect_of(connection: Connection) -> Any:
    """Return the dialect module whose `insert` has `on_conflict_do_update` for this database."""
    return postgresql if connection.dialect.name == "postgresql" else sqlite
