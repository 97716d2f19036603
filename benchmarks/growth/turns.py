"""The work of the store's writer on a long run's database, and the duration of every SQL statement.

The store's own writer records one training step, in transactions of the size that a busy hub uses. Groups are opened
and leased; rollouts arrive, are scored, checked and dropped; a step is planned and trained; and all nodes fetch its
version. Then nodes are noted as present, and old steps, rollouts and fetches are deleted.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from sqlalchemy import Engine
from sqlalchemy.event import listen, remove

from benchmarks.harness.books import BYTES, GROUP_SIZE, LEASE_SIZE
from echo_hub.core.accounting.effects import (
    CheckingCredited,
    CheckRecorded,
    CostAccrued,
    GroupDropped,
    GroupOpened,
    GroupsRated,
    NodeCost,
    Record,
    RolloutReceived,
    RolloutsDropped,
    RolloutsLeased,
    ScoreRecorded,
    StandingRecorded,
    StepPlanned,
    StepTrained,
    TrustDecided,
    VersionRecorded,
)
from echo_hub.core.trust.standing import Decision, StandingRow
from echo_hub.spread.holdings import Arrival, Release
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.bulk import key_of
from echo_hub.store.known_nodes import note_still_here
from echo_hub.store.retired import StepSpan, read_last
from echo_hub.store.retiring import ROWS_AT_ONCE, read_final_keys, read_first_mark, read_ripe, retire
from echo_shared.records.rollout import RolloutPayload
from echo_shared.records.run import RunEvent
from echo_shared.wire.messages import Checked, DropReason, Fetched, FinishReason, Way, rollout_id

PART: Final = 512
"""Maximum number of records of one kind in one turn (one transaction of the store's writer)."""
WRITER: Final = "store-writer"
_LIST: Final = re.compile(r"IN \([?%][^(]*(\([^()]*\)[^()]*)*\)")
"""Matches an SQL list of parameters of any length, so that statements that differ only in this length count as one."""


@dataclass(slots=True)
class Heard:
    """Longest time that each SQL statement of the store's writer took, in seconds per set of parameters."""

    worst: dict[str, float] = field(default_factory=dict)
    _began_s: float = 0.0

    def note(self, sql: str, seconds: float) -> None:
        name = " ".join(_LIST.sub("IN (...)", sql).split())
        self.worst[name] = max(self.worst.get(name, 0.0), seconds)


@contextmanager
def hearing(engine: Engine) -> Iterator[Heard]:
    """Time the writer's statements during the block. Each query is first executed separately and read to its last row,
    because SQLite finds rows only as they are read.
    """
    heard = Heard()
    clock = time.thread_time if engine.dialect.name == "sqlite" else time.perf_counter

    def before(_connection: Any, cursor: Any, sql: str, given: Any, _context: Any, many: bool) -> None:
        if not threading.current_thread().name.startswith(WRITER):
            return
        if sql.startswith("SELECT") and not many:
            with_rows = cursor.connection.cursor()
            began_s = clock()
            with_rows.execute(sql, given)
            with_rows.fetchall()
            heard.note(sql, clock() - began_s)
            with_rows.close()
        heard._began_s = clock()

    def after(_connection: Any, _cursor: Any, sql: str, given: Any, _context: Any, many: bool) -> None:
        if threading.current_thread().name.startswith(WRITER) and not sql.startswith(("SELECT", "BEGIN")):
            heard.note(sql, (clock() - heard._began_s) / (len(given) if many else 1))

    listen(engine, "before_cursor_execute", before)
    listen(engine, "after_cursor_execute", after)
    try:
        yield heard
    finally:
        remove(engine, "before_cursor_execute", before)
        remove(engine, "after_cursor_execute", after)


@dataclass(slots=True, kw_only=True)
class Turns:
    """Does the work of the store's writer, one transaction (turn) after another. `lease_id` and `group_id` are the next
    free ids.
    """

    store: AsyncStore
    nodes: Sequence[str]
    groups_per_step: int
    step: int
    lease_id: int
    group_id: int
    now: float

    async def work(self) -> None:
        groups = range(self.group_id, self.group_id + self.groups_per_step)
        leases = [
            RolloutsLeased(
                lease_id=self.lease_id + number,
                node_id=self.nodes[(self.step + number) % len(self.nodes)],
                group_id=groups[number * LEASE_SIZE // GROUP_SIZE],
                indices=tuple(range(number * LEASE_SIZE % GROUP_SIZE, number * LEASE_SIZE % GROUP_SIZE + LEASE_SIZE)),
                turn=0,
                policy_version=self.step - 1,
                deadline=self.now + 60.0,
            )
            for number in range(len(groups) * GROUP_SIZE // LEASE_SIZE)
        ]
        ids = [rollout_id(lease.lease_id, index) for lease in leases for index in lease.indices]
        await self._turns([GroupOpened(group_id=group_id, seed=group_id) for group_id in groups])
        await self._turns(leases)
        await self._turns([RolloutReceived(rollout_id=one, received_at=self.now, payload=_payload()) for one in ids])
        await self._turns([ScoreRecorded(rollout_id=one, reward=float(n % 2)) for n, one in enumerate(ids)])
        await self._turns(self._checks(ids[::20]))
        stale, trained = ids[: len(ids) // 16], ids[len(ids) // 16 :]
        dropped = len(stale) // GROUP_SIZE
        await self._turns(
            [
                RolloutsDropped(rollout_ids=tuple(stale), reason=DropReason.STALE),
                *(GroupDropped(group_id=group_id, reason=DropReason.STALE) for group_id in groups[:dropped]),
                GroupsRated(pass_rates=tuple((group_id, 0.5) for group_id in groups[dropped:])),
            ]
        )
        batch = tuple(groups[dropped:])
        planned = StepPlanned(
            step=self.step,
            group_ids=batch,
            rollout_ids=tuple(trained),
            staleness=(1,) * len(batch),
            planned_at=self.now,
        )
        await self._turns([planned])
        metrics = {"loss": 0.5, "train_s": 2.0}
        node_of = {lease.lease_id: lease.node_id for lease in leases}
        done = StepTrained(
            step=self.step,
            rollout_ids=tuple(trained),
            metrics=metrics,
            trained_at=self.now,
            node_ids=tuple(node_of[key_of(one)[0]] for one in trained),
        )
        await self._turns([done, VersionRecorded(policy_version=self.step, published_at=self.now)])
        await self.store.counted()
        self.step, self.lease_id, self.group_id = self.step + 1, self.lease_id + len(leases), groups.stop

    def _checks(self, ids: Sequence[str]) -> list[Record]:
        some = self.nodes[: len(ids)]
        return [
            *(CheckRecorded(rollout_id=one, checked=Checked.PASSED) for one in ids),
            *(StandingRecorded(row=StandingRow(node_id=node_id, num_verified=3)) for node_id in some),
            *(CheckingCredited(node_id=node_id, num_tokens=9) for node_id in some),
            TrustDecided(node_id=some[0], decision=Decision.TRUSTED, reason="", decided_at=self.now),
            CostAccrued(nodes=tuple(NodeCost(node_id, 5.0, 0.01) for node_id in some)),
        ]

    async def _turns(self, records: Sequence[Record]) -> None:
        event = RunEvent(at=self.now, kind="node_joined", subject=self.nodes[0], text="it has joined")
        for start in range(0, len(records), PART):
            await self.store.apply(records[start : start + PART], self.now, [event])

    async def fetched_by_all(self) -> None:
        """Record that every node has fetched the newest version, like the distributor."""
        version = self.step - 1
        await self.store.on_writer(
            self.store.store.record_distribution,
            [Release(policy_version=version, adapter_bytes=BYTES, payload_bytes=BYTES, carrier="delta", way=Way.SWARM)],
            self.now,
        )
        for start in range(0, len(self.nodes), PART):
            arrivals = [
                Arrival(
                    node_id=node_id,
                    fetched=Fetched(
                        info_hash=version.to_bytes(20),
                        policy_version=version,
                        seconds=1.0,
                        swarm_bytes=BYTES,
                        web_seed_bytes=0,
                    ),
                    broadcast_s=1.0 + number / len(self.nodes),
                )
                for number, node_id in enumerate(self.nodes[start : start + PART])
            ]
            await self.store.on_writer(self.store.store.record_distribution, arrivals, self.now)

    async def keep_house(self) -> None:
        """Note nodes as present and delete old records, like `Housekeeping`. Also record that a node has joined."""
        await self.store.write(note_still_here, self.nodes, self.now)
        await self.store.on_writer(self.store.store.prune, self.step - 20)
        joined = self.nodes[0]
        await self.store.on_writer(
            self.store.store.node_seen,
            node_id=joined,
            public_key=bytes(32),
            name=joined[:8],
            backend="torch",
            device="cpu",
            now=self.now,
        )
        await self._let_go()

    async def _let_go(self) -> None:
        """Delete the records of the oldest step, like the hub's `Retention`."""
        last = self.store.store.read(read_last)
        after = self.store.store.read(read_first_mark) if last is None else last.through
        for one in self.store.store.read(read_ripe, after, after.step + 2):
            span = StepSpan(after=after, through=one.mark)
            keys = self.store.store.read(read_final_keys, span)
            for start in range(0, len(keys), ROWS_AT_ONCE):
                await self.store.on_writer(retire, self.store.store, keys[start : start + ROWS_AT_ONCE], span)


def _payload() -> RolloutPayload:
    return RolloutPayload(
        completion_ids=np.arange(6, dtype=np.int32),
        behavior_logprobs=np.full(6, -0.5, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.5,
    )
