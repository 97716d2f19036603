"""The facts that determine the random draws of a stored rollout, so that a checker can repeat them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from echo_hub.store.bulk import among, key_of
from echo_hub.store.reading import StoredPayload, in_parts, read_payloads
from echo_hub.store.tables import groups, rollouts
from echo_shared.wire.messages import DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDraw:
    """A rollout with stored tokens, and the facts that determine the random numbers with which they were drawn."""

    stored: StoredPayload
    index: int
    turn: int
    group_seed: int | None
    """Seed of the rollout's group; None for an evaluation group, which has no row in `groups`."""
    scorer_failures: int
    """How often scoring failed on this turn before the rollout was leased. Each failure gives the turn another seed."""


def read_draws(connection: Connection, rollout_ids: Sequence[str]) -> list[StoredDraw]:
    """Return, for each of these rollouts in the given order, its stored tokens and the facts that determine the random
    numbers with which they were drawn. Rollouts whose tokens were deleted are left out.
    """
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
    """Return the turn of each rollout, by (lease, index); and the leases whose scoring failed, by (group,
    index, turn).
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
