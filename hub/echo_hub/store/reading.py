"""Read payloads to score, a step's batch, and receipts. The hub and the learner use these queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, select

from echo_hub.core.accounting.groups import turn_seed
from echo_hub.core.evaluation_groups import EvaluationGroup, evaluation_ids
from echo_hub.store import old_receipts
from echo_hub.store.bulk import among, key_of
from echo_hub.store.payload_rows import NAMES, ids_of, payload_of
from echo_hub.store.tables import WITH_PAYLOAD, groups, payloads, rollouts, steps
from echo_shared.errors import StorageError
from echo_shared.records.rewards import Reward
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import (
    MAX_GROUP_SIZE,
    Checked,
    DropReason,
    FinishReason,
    Receipt,
    ReceiptState,
    rollout_id,
)

_Key = TypeVar("_Key")

_ANSWERED = (ReceiptState.SCORED, ReceiptState.TRAINED, ReceiptState.EVALUATED)
"""States in which the environment has answered a turn and the turn's tokens are still stored."""

_KEYS_A_QUERY: Final = 1_000
"""Number of keys in one query. This is far below the limit of parameters in both kinds of database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredTurn:
    """A turn that the environment has answered. `completion_ids` were sampled; `observation_ids` are all token ids
    between these and the next turn's completion.
    """

    completion_ids: NDArray[np.int32]
    observation_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """Log-probabilities of `completion_ids` under the sampling policy, in nats; empty = unknown."""
    finish_reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPayload:
    """A received rollout that is not final: neither trained on nor evaluated nor dropped."""

    rollout_id: str
    group_id: int
    earlier_turns: tuple[AnsweredTurn, ...]
    payload: RolloutPayload
    """The tokens, with spans (which node sampled which tokens) that cover all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTurn:
    """One turn of an episode in a step's batch. Each turn is one rollout."""

    rollout_id: str
    seed: int
    """Seed from the rollout's lease, which determines the random numbers of the rollout's draws."""
    index: int
    payload: RolloutPayload
    """The tokens, with spans (which node sampled which tokens) that cover all of them."""
    turn_reward: float = 0.0
    """The part of the episode's reward that this turn earned; 0 for the last turn, which earned the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEpisode:
    """One episode of a group: its turns in order, at least one, and its reward."""

    turns: tuple[BatchTurn, ...]
    reward: float | None
    """Reward of the episode; None if the episode is not scored yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """One group of a step's batch. The prompt is not stored, because `group_id` determines it."""

    group_id: int
    seed: int
    episodes: tuple[BatchEpisode, ...]
    """The group's episodes in training order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEpisode:
    """One ended episode of an evaluation whose completions nodes sampled."""

    about: EvaluationGroup
    num_tokens: int
    """Number of sampled tokens over all turns of the episode."""
    truncated: bool
    """True if any turn was cut off at the length limit."""
    reward: float | None
    """The reward of the episode; None if the scorer failed."""
    leased_at: float
    """Time at which the first turn was leased, in seconds since the epoch."""
    received_at: float
    """Time at which the last turn was received, in seconds since the epoch."""


def scorer_failures(connection: Connection, group_ids: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    query = (
        select(rollouts.c.group_id, rollouts.c.index.label("at"), rollouts.c.turn)
        .where(rollouts.c.drop_reason == DropReason.SCORER_FAILED)
        .order_by(rollouts.c.lease_id, rollouts.c.index)
    )
    return tuple(
        (row.group_id, row.at, row.turn)
        for part in in_parts(group_ids)
        for row in connection.execute(query.where(among(connection, rollouts.c.group_id, part)))
    )


def read_payloads(connection: Connection, rollout_ids: Sequence[str]) -> list[StoredPayload]:
    """Return payloads in the order of the ids. Rollouts whose payload was deleted are left out."""
    keys = [key_of(wanted) for wanted in rollout_ids]
    query = select(
        payloads.c.lease_id,
        payloads.c.index.label("at"),
        *(payloads.c[name] for name in NAMES),
        rollouts.c.group_id,
        rollouts.c.turn,
        rollouts.c.node_id,
        rollouts.c.policy_version,
    ).join_from(payloads, rollouts, WITH_PAYLOAD)
    rows = [
        row
        for lease_ids in in_parts({lease_id for lease_id, _ in keys})
        for row in connection.execute(query.where(among(connection, payloads.c.lease_id, lease_ids)))
    ]
    earlier = read_turns(connection, {(row.group_id, row.at) for row in rows if row.turn})
    found = {
        (row.lease_id, row.at): StoredPayload(
            rollout_id=rollout_id(row.lease_id, row.at),
            group_id=row.group_id,
            earlier_turns=earlier.get((row.group_id, row.at), ()) if row.turn else (),
            payload=payload_of(row, is_attributed=True),
        )
        for row in rows
    }
    return [found[key] for key in keys if key in found]


def read_turns(
    connection: Connection, episodes: Collection[tuple[int, int]]
) -> dict[tuple[int, int], tuple[AnsweredTurn, ...]]:
    """Return the answered turns of episodes, keyed by (group id, index), in order.

    Episodes that were dropped or have no answered turn are left out.
    """
    query = (
        select(
            rollouts.c.group_id,
            rollouts.c.index.label("at"),
            rollouts.c.state,
            payloads.c.completion_ids,
            payloads.c.observation_ids,
            payloads.c.behavior_logprobs,
            payloads.c.finish_reason,
        )
        .join_from(rollouts, payloads, WITH_PAYLOAD)
        .where(payloads.c.observation_ids.is_not(None))
        .order_by(rollouts.c.turn)
    )
    turns: dict[tuple[int, int], tuple[AnsweredTurn, ...]] = {}
    for group_ids in in_parts({group_id for group_id, _ in episodes}):
        for row in connection.execute(query.where(among(connection, rollouts.c.group_id, group_ids))):
            episode = (row.group_id, row.at)
            # Filter by state here: with a condition in the query, SQLite would scan all scored rows instead of the
            # groups.
            if episode in episodes and row.state in _ANSWERED:
                turn = AnsweredTurn(
                    completion_ids=ids_of(row.completion_ids),
                    observation_ids=ids_of(row.observation_ids),
                    behavior_logprobs=np.frombuffer(row.behavior_logprobs, "<f4"),
                    finish_reason=FinishReason(row.finish_reason),
                )
                turns[episode] = (*turns.get(episode, ()), turn)
    return turns


def in_parts(keys: Iterable[_Key]) -> Iterator[list[_Key]]:
    rest = iter(keys)
    while part := list(islice(rest, _KEYS_A_QUERY)):
        yield part


def read_batch(connection: Connection, step: int) -> list[BatchGroup]:
    """Return a planned batch in training order. Raises StorageError if the step was never planned or its tokens are
    already deleted (pruned).
    """
    batch = connection.execute(
        select(steps.c.group_ids, steps.c.rollout_ids, steps.c.pruned).where(steps.c.step == step)
    ).one_or_none()
    if batch is None or batch.pruned:
        raise StorageError(
            "The batch of a step is not in the store.",
            got=f"step {step}, {'never planned' if batch is None else 'pruned'}",
            do="Restore the run directory, checkpoints and database together, from one backup.",
        )
    rows = _rollout_rows(connection, batch.group_ids)
    return _batch_groups(connection, batch.group_ids, [(name, rows[name]) for name in batch.rollout_ids])


def read_groups(connection: Connection, wanted: Mapping[int, Sequence[str]]) -> list[BatchGroup]:
    """Return groups with the given rollouts, in the given order. Groups with a rollout whose tokens are deleted
    are left out."""
    rows = _rollout_rows(connection, wanted)
    there = {group_id: names for group_id, names in wanted.items() if all(name in rows for name in names)}
    return _batch_groups(connection, there, [(name, rows[name]) for names in there.values() for name in names])


def _rollout_rows(connection: Connection, group_ids: Collection[int]) -> dict[str, Any]:
    """Return the stored data of the groups' rollouts, by rollout id."""
    query = select(
        rollouts.c.lease_id,
        rollouts.c.index.label("at"),
        rollouts.c.group_id,
        rollouts.c.turn,
        rollouts.c.node_id,
        rollouts.c.policy_version,
        rollouts.c.reward,
        rollouts.c.turn_reward,
        *(payloads.c[name] for name in NAMES),
    ).join_from(rollouts, payloads, WITH_PAYLOAD)
    return {
        rollout_id(row.lease_id, row.at): row
        for part in in_parts(group_ids)
        for row in connection.execute(query.where(among(connection, rollouts.c.group_id, part)))
    }


def _batch_groups(
    connection: Connection, group_ids: Collection[int], in_order: Sequence[tuple[str, Any]]
) -> list[BatchGroup]:
    query = select(groups.c.group_id, groups.c.seed)
    seed_of = {
        row.group_id: row.seed
        for part in in_parts(group_ids)
        for row in connection.execute(query.where(among(connection, groups.c.group_id, part)))
    }
    attempts = Counter(scorer_failures(connection, list(group_ids)))
    return [
        BatchGroup(
            group_id=group_id,
            seed=seed_of[group_id],
            episodes=tuple(
                _episode(list(turns), seed_of[group_id], attempts)
                for _, turns in groupby(of_group, key=lambda wanted_row: wanted_row[1].at)
            ),
        )
        for group_id, of_group in groupby(in_order, key=lambda wanted_row: wanted_row[1].group_id)
    ]


def _episode(
    rows: Sequence[tuple[str, Any]], group_seed: int, attempts: Mapping[tuple[int, int, int], int]
) -> BatchEpisode:
    turns = tuple(
        BatchTurn(
            rollout_id=name,
            seed=turn_seed(group_seed, row.turn, attempts.get((row.group_id, row.at, row.turn), 0)),
            index=row.at,
            payload=payload_of(row, is_attributed=True),
            turn_reward=row.turn_reward or 0.0,
        )
        for name, row in rows
    )
    return BatchEpisode(turns=turns, reward=rows[-1][1].reward)


def read_evaluated(connection: Connection, policy_version: int) -> list[EvaluatedEpisode]:
    """Return the finished episodes of an evaluation by nodes, ordered by group and index."""
    ids = evaluation_ids(policy_version)
    rows = connection.execute(
        select(
            rollouts.c.group_id,
            rollouts.c.index.label("at"),
            rollouts.c.num_tokens,
            rollouts.c.reward,
            rollouts.c.components,
            rollouts.c.leased_at,
            rollouts.c.received_at,
            payloads.c.finish_reason,
        )
        .join_from(rollouts, payloads, WITH_PAYLOAD)
        .where(rollouts.c.group_id.between(ids[0], ids[-1]), rollouts.c.state == ReceiptState.EVALUATED)
        .order_by(rollouts.c.group_id, rollouts.c.index, rollouts.c.turn)
    )
    episodes = []
    for (group_id, _), of_episode in groupby(rows, key=lambda row: (row.group_id, row.at)):
        turns, about = list(of_episode), EvaluationGroup.of(group_id)
        assert about is not None
        episodes.append(
            EvaluatedEpisode(
                about=about,
                num_tokens=sum(turn.num_tokens for turn in turns),
                truncated=any(turn.finish_reason == FinishReason.LENGTH for turn in turns),
                reward=_reward(turns[-1]),
                leased_at=turns[0].leased_at,
                received_at=turns[-1].received_at,
            )
        )
    return episodes


def _reward(row: Any) -> float | None:
    return row.reward if row.reward is None or row.components is None else Reward(row.reward, row.components)


def read_receipts(connection: Connection, node_id: str, asked: Sequence[str]) -> list[Receipt]:
    """Return the receipts of rollouts in the given order, for the node that they were leased to.

    A rollout of another node, or an id that was never leased, gets a receipt "dropped as invalid".
    """
    keys = {key for wanted in asked if (key := _possible_key(wanted)) is not None}
    rows = [
        row
        for lease_ids in in_parts({lease_id for lease_id, _ in keys})
        # Query by lease alone: for (lease, index) pairs, SQLite would scan every rollout of the run.
        for row in connection.execute(
            select(
                rollouts.c.lease_id,
                rollouts.c.index.label("at"),
                rollouts.c.node_id,
                rollouts.c.state,
                rollouts.c.drop_reason,
                rollouts.c.checked,
            ).where(among(connection, rollouts.c.lease_id, lease_ids))
        )
    ]
    known: dict[tuple[int, int], Any] = {(row.lease_id, row.at): row for row in rows}
    known |= old_receipts.find(connection, keys - known.keys())
    found = {
        name: Receipt(
            rollout_id=name,
            state=ReceiptState(row.state),
            drop_reason=None if row.drop_reason is None else DropReason(row.drop_reason),
            checked=Checked(row.checked),
        )
        for key, row in known.items()
        # Filter by node here: with a condition in the query, SQLite would use the index of nodes, which is slower than
        # the primary key.
        if row.node_id == node_id and (name := rollout_id(*key))
    }
    return [
        found.get(wanted) or Receipt(rollout_id=wanted, state=ReceiptState.DROPPED, drop_reason=DropReason.INVALID)
        for wanted in asked
    ]


def _possible_key(asked: str) -> tuple[int, int] | None:
    """Return the lease and index in a rollout id; None if no hub can have issued this id. The test is needed because
    PostgreSQL fails on too large numbers.
    """
    lease_id, index = key_of(asked)
    given = lease_id < 2**63 and index < MAX_GROUP_SIZE and rollout_id(lease_id, index) == asked
    return (lease_id, index) if given else None
