"""Recent rollouts, versions and nodes, as input for estimates of speed. Reads only.

The cost does not grow with the run: lease ids increase with time, so the newest rollouts are at the end of the index.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, select

from echo_hub.store.at_once import rows_at_once
from echo_hub.store.tables import fetches, nodes, payloads, rollouts, steps, versions

ARRIVALS_READ: Final = 20_000
"""Largest number of arrivals read for one version: enough to estimate a quantile."""

NODES_A_QUERY: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentRollout:
    node_id: str
    leased_at: float
    received_at: float | None
    """Time at which the hub received the rollout, in seconds since the epoch; None before that."""
    sampling_s: float | None = None
    """Seconds of sampling, as the node reported them. None without a received rollout, or after deletion of its tokens.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How fast one published version spread to the nodes."""

    policy_version: int
    trained_at: float | None
    published_at: float
    seconds: tuple[float, ...]
    """Seconds from the announcement to each arrival, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """Engine, device and price of a node, as the node reports them."""

    backend: str
    device: str
    cost_per_hour: float = 0.0
    """Price of the node, in US dollars per hour."""
    power_watts: float = 0.0


def read_recent_rollouts(connection: Connection, newest: int) -> list[RecentRollout]:
    """Return the rollouts that were leased last, newest first."""
    same = (payloads.c.lease_id == rollouts.c.lease_id) & (payloads.c.index == rollouts.c.index)
    rows = rows_at_once(
        connection,
        select(rollouts.c.node_id, rollouts.c.leased_at, rollouts.c.received_at, payloads.c.sampling_s)
        .join_from(rollouts, payloads, same, isouter=True)
        .order_by(rollouts.c.lease_id.desc())
        .limit(newest),
    )
    return [
        RecentRollout(
            node_id=row.node_id, leased_at=row.leased_at, received_at=row.received_at, sampling_s=row.sampling_s
        )
        for row in rows
    ]


def read_spreads(connection: Connection, newest: int) -> list[Spread]:
    """Return the arrival times of the newest published versions, newest version first."""
    published = connection.execute(
        select(versions.c.policy_version, versions.c.published_at)
        .order_by(versions.c.policy_version.desc())
        .limit(newest)
    ).all()
    known = [row.policy_version for row in published]
    trained = connection.execute(select(steps.c.step, steps.c.trained_at).where(steps.c.step.in_(known)))
    trained_at = {row.step: row.trained_at for row in trained}
    return [
        Spread(
            policy_version=row.policy_version,
            trained_at=trained_at.get(row.policy_version),
            published_at=row.published_at,
            seconds=_arrivals(connection, row.policy_version),
        )
        for row in published
    ]


def _arrivals(connection: Connection, version: int) -> tuple[float, ...]:
    rows = connection.scalars(
        select(fetches.c.broadcast_s)
        .where(fetches.c.policy_version == version, fetches.c.broadcast_s.is_not(None))
        .limit(ARRIVALS_READ)
    )
    return tuple(sorted(seconds for seconds in rows if seconds is not None))


def read_node_kinds(connection: Connection, node_ids: Iterable[str]) -> dict[str, NodeKind]:
    wanted = sorted(set(node_ids))
    query = select(nodes.c.node_id, nodes.c.backend, nodes.c.device, nodes.c.cost_per_hour, nodes.c.power_watts)
    return {
        row.node_id: NodeKind(
            backend=row.backend, device=row.device, cost_per_hour=row.cost_per_hour, power_watts=row.power_watts
        )
        for start in range(0, len(wanted), NODES_A_QUERY)
        for row in connection.execute(query.where(nodes.c.node_id.in_(wanted[start : start + NODES_A_QUERY])))
    }
