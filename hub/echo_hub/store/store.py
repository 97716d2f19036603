"""The hub's database: `Store.read` and `Store.write` run the queries and commands of this package.

A query or command is a function whose first argument is a connection (for example `reports.read_costs`,
`standings.want_pardon`). Each call is one transaction. `Store` itself has methods only for operations whose state lasts
between transactions.

All methods block the calling thread. The hub writes from one thread. Another process may write too (`echo-hub ban`);
the database lets one of them write at a time. Reads may run on other threads at the same time: SQLite in WAL mode and
PostgreSQL both give each read the state of one commit. StorageError is raised if the database fails: locked, damaged,
disk full or server unreachable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, delete, insert, select, update

from echo_hub.core.accounting.effects import Record
from echo_hub.core.evaluation_groups import evaluation_ids
from echo_hub.spread.holdings import Arrival, Release
from echo_hub.store import lost_commits, reports
from echo_hub.store.arrivals import write_news
from echo_hub.store.bulk import key_of
from echo_hub.store.database import (
    check_migrated,
    check_undamaged,
    connect,
    migrate,
    one_look,
    open_to_read,
    open_to_write,
    storage_errors,
)
from echo_hub.store.events import KEPT, add_events
from echo_hub.store.keeping import Keeping, forget, trim
from echo_hub.store.old_fetches import FetchMark, forget_old_fetches
from echo_hub.store.owners import leave_owner
from echo_hub.store.tables import evaluations, nodes, rollouts, set_evaluations, steps
from echo_hub.store.touched import Touched
from echo_hub.store.training import count_trained, uncounted_steps
from echo_hub.store.writing import write
from echo_shared.records.run import Evaluation, RunEvent, VersionRecord

P = ParamSpec("P")
T = TypeVar("T")


class Store:
    """The store of one run; create it with `open`."""

    def __init__(self, engine: Engine, keeping: Keeping, *, events_kept: int = KEPT) -> None:
        self.engine = engine
        self.keeping = keeping
        self.events_kept = events_kept
        """Number of events kept for each kind."""
        self.touched = Touched()
        """Nodes whose totals have changed since the hub's start, with the order of the changes."""
        self.is_uncounted = False
        """True if some rollouts of a trained step are missing from the totals."""
        self._fetched: Mapping[int, reports.FetchSummary] = {}
        """Fetches of each version, as the last call of `versions_history` found them. The arrival times of a version
        are read again only if its number of fetches has changed.
        """
        self._forgotten = FetchMark()
        """The point at which the next deletion of old fetch rows continues."""

    @classmethod
    def open(
        cls, url: str, *, beside_hub: bool = False, keeping: Keeping | None = None, events_kept: int = KEPT
    ) -> Store:
        """Open or create the database, check it for damage, and migrate it. Raises ConfigError for a bad URL,
        StorageError for any other failure.

        Set `beside_hub` if a hub may be using the database. Then the database is neither created nor migrated:
        ConfigError is raised if no hub has made it yet, StorageError if it needs a migration. `keeping` limits the kept
        copies of tokens that the hub no longer needs; None means the default limits. `events_kept` is the number of
        events kept for each kind.
        """
        engine = connect(url)
        try:
            if beside_hub:
                check_migrated(engine)
            else:
                check_undamaged(engine)
                migrate(engine)
                with storage_errors("The hub's database cannot be opened."):
                    lost_commits.prepare(engine)
        except BaseException:
            engine.dispose()
            raise
        store = cls(engine, keeping or Keeping(), events_kept=events_kept)
        if not beside_hub:
            store.count_all()
        return store

    def close(self) -> None:
        self.engine.dispose()

    def one_look(self) -> AbstractContextManager[None]:
        """Let all reads of this thread inside the `with` block see the state of one commit."""
        return one_look(self.engine)

    def read(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `query` in a transaction that reads the state of a single commit."""
        with open_to_read(self.engine) as connection:
            return query(connection, *args, **kwargs)

    def write(self, command: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `command` in one transaction, which is committed when this method returns."""
        with open_to_write(self.engine) as connection:
            return command(connection, *args, **kwargs)

    def apply(self, records: Sequence[Record], now: float, events: Sequence[RunEvent] = ()) -> None:
        """Commit all records and events of one coordinator pass in a single transaction. When this method returns, they
        are on disk."""
        with open_to_write(self.engine) as connection:
            written = write(connection, records, now)
            forget(connection, written.tokens_gone, self.keeping)
            if events:
                add_events(connection, events, kept=self.events_kept)
            is_uncounted = written.has_trained and bool(uncounted_steps(connection))
        self.is_uncounted |= is_uncounted
        if written.touched:
            self.touched.note(written.touched)

    def count_trained(self) -> None:
        """Mark one more part of the trained steps' rollouts as trained, and add it to the totals. Call again while
        `is_uncounted`.
        """
        with open_to_write(self.engine) as connection:
            counted = count_trained(connection)
            self.is_uncounted = bool(uncounted_steps(connection))
        self.touched.note(counted)

    def count_all(self) -> None:
        """Count all trained rollouts that an earlier process left uncounted."""
        self.is_uncounted = True
        while self.is_uncounted:
            self.count_trained()

    def prune(self, checkpoint_step: int) -> None:
        """Delete the tokens of steps up to `checkpoint_step`, the oldest kept checkpoint: the learner can no longer
        repeat these steps. If `keeping` chooses a group, its tokens are copied first.

        Also delete old fetch rows. Steps with uncounted rollouts keep their tokens until the next call.
        """
        with open_to_write(self.engine) as connection:
            counted = steps.c.step.not_in(uncounted_steps(connection))
            done = (
                steps.c.step <= checkpoint_step,
                steps.c.trained_at.is_not(None),
                steps.c.pruned.is_(False),
                counted,
            )
            for rollout_ids in connection.scalars(select(steps.c.rollout_ids).where(*done)).all():
                forget(connection, map(key_of, rollout_ids), self.keeping)
            connection.execute(update(steps).where(*done).values(pruned=True))
            trim(connection, self.keeping)  # The operator may have lowered the byte limit.
            forgotten = forget_old_fetches(connection, self._forgotten)
        self._forgotten = forgotten

    def node_seen(
        self,
        *,
        node_id: str,
        public_key: bytes,
        name: str,
        backend: str,
        device: str,
        now: float,
        cost_per_hour: float = 0.0,
        power_watts: float = 0.0,
        invite_id: int | None = None,
        owner_key: bytes = b"",
        owner_claim: bytes = b"",
    ) -> None:
        """Record that a node has joined, for the first time or again. If it gives no invite, the invite of its first
        join stays. If it gives no owner, it leaves its former owner.
        """
        said = {
            "public_key": public_key.hex(),
            "name": name,
            "backend": backend,
            "device": device,
            "last_seen": now,
            "cost_per_hour": cost_per_hour,
            "power_watts": power_watts,
            "owner_key": owner_key.hex() or None,
            "owner_claim": owner_claim.hex() or None,
            **({} if invite_id is None else {"invite_id": invite_id}),
        }
        with open_to_write(self.engine) as connection:
            leave_owner(connection, node_id, owner_key.hex())
            if connection.execute(update(nodes).where(nodes.c.node_id == node_id).values(said)).rowcount == 0:
                connection.execute(insert(nodes), {"node_id": node_id, "first_seen": now, **said})
        self.touched.note([node_id])

    def record_distribution(self, news: Sequence[Release | Arrival], now: float) -> None:
        """Record how published versions were announced, and which nodes have fetched and verified which artefact.

        The caller has checked that the artefacts belong to this run.
        """
        with open_to_write(self.engine) as connection:
            forgotten = write_news(connection, news, now, self._forgotten)
        self._forgotten = forgotten

    def record_evaluations(self, measured: Sequence[Evaluation]) -> None:
        """Record all evaluations of a version, or replace them. This is one transaction, so a version is never partly
        evaluated.

        The payloads of the evaluated rollouts are deleted. If `keeping` chooses a group, its payloads are copied first.
        """
        with open_to_write(self.engine) as connection:
            for evaluation in measured:
                row = asdict(evaluation)
                table = set_evaluations if evaluation.name else evaluations
                key = {name: row[name] for name in table.primary_key.columns.keys()}  # noqa: SIM118
                connection.execute(delete(table).filter_by(**key))
                connection.execute(insert(table), {name: row[name] for name in table.columns.keys()})  # noqa: SIM118
            for version in {evaluation.policy_version for evaluation in measured}:
                ids = evaluation_ids(version)
                drawn = select(rollouts.c.lease_id, rollouts.c.index).where(
                    rollouts.c.group_id.between(ids[0], ids[-1])
                )
                forget(connection, [(lease, index) for lease, index in connection.execute(drawn)], self.keeping)

    def versions_history(self, newest: int) -> list[VersionRecord]:
        """Return the records of the `newest` published versions, oldest first."""
        with open_to_read(self.engine) as connection:
            published = reports.read_published(connection, newest)
            wanted = [row.policy_version for row in published]
            self._fetched = reports.read_fetched(connection, wanted, self._fetched)
            return reports.version_records(published, self._fetched)
