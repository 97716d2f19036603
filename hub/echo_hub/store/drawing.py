"""The facts that determine a committed rollout's random draws, for checks of the draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from echo_hub.store.bulk import among
from echo_hub.store.changing import key_of
from echo_hub.store.reading import StoredPayload, in_parts, read_payloads
from echo_hub.store.tables import groups, rollouts
from echo_shared.wire.messages import DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDraw:
    """A committed rollout whose tokens are still kept."""

    stored: StoredPayload
    index: int
    turn: int
    group_seed: int | None
    """Seed of the rollout's group; None for a group that is not for training."""
    scorer_failures: int
    """Failures of the scorer on this turn before the rollout was leased. Each failure changes the turn's seed."""


def read_draws(connection: Connection, rollout_ids: Sequence[str]) -> list[StoredDraw]:
    """Return the draws of these rollouts, in the given order, without those whose tokens were deleted."""
    found = read_payloads(connection, rollout_ids)
    group_ids = {stored.group_id for stored in found}
    seeds = _seeds(connection, group_ids)
    turns, failures = _turns(connection, group_ids)
    result = []
    for stored in found:
        lease_id, index = key_of(stored.rollout_id)
        turn = turns[lease_id, index]
        result.append(
            StoredDraw(
                stored=stored,
                index=index,
                turn=turn,
                group_seed=seeds.get(stored.group_id),
                scorer_failures=sum(failed < lease_id for failed in failures.get((stored.group_id, index, turn), ())),
            )
        )
    return result


def _seeds(connection: Connection, group_ids: Iterable[int]) -> dict[int, int]:
    query = select(groups.c.group_id, groups.c.seed)
    return {
        row.group_id: row.seed
        for part in in_parts(group_ids)
        for row in connection.execute(query.where(among(connection, groups.c.group_id, part)))
    }


def _turns(
    connection: Connection, group_ids: Iterable[int]
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int, int], list[int]]]:
    """Return the turn of each rollout, by (lease, index), and the leases on which the scorer failed.

    The leases are listed by (group, index, turn).
    """
    query = select(
        rollouts.c.lease_id, rollouts.c.index.label("at"), rollouts.c.group_id, rollouts.c.turn, rollouts.c.drop_reason
    )
    turns: dict[tuple[int, int], int] = {}
    failures: dict[tuple[int, int, int], list[int]] = {}
    for part in in_parts(group_ids):
        for row in connection.execute(query.where(among(connection, rollouts.c.group_id, part))):
            turns[row.lease_id, row.at] = row.turn
            if row.drop_reason == DropReason.SCORER_FAILED:
                failures.setdefault((row.group_id, row.at, row.turn), []).append(row.lease_id)
    return turns, failures
