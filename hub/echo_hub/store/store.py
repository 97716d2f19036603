"""The hub's database: `Store.read` and `Store.write` carry out the queries and commands of this package.

A query or command is a function whose first argument is a connection (`reports.read_costs`, `standings.want_pardon`).
Each call is one transaction. `Store` itself has methods only for what keeps state between transactions.

Synchronous. The hub writes from one thread; another process that writes (`echo-hub ban`) waits its turn. Reads may run
on other threads at the same time: SQLite in WAL mode and PostgreSQL both give each read the state of one commit.
StorageError is raised when the database cannot do it: locked, damaged, disk full, its server away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, delete, insert, select, update

from echo_hub.core.effects import Record
from echo_hub.core.evaluation_groups import evaluation_ids
from echo_hub.core.spread.holdings import Arrival, Release
from echo_hub.store import lost_commits, reports
from echo_hub.store.arrivals import write_news
from echo_hub.store.changing import key_of
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
from echo_hub.store.old_fetches import Place, forget_old_fetches
from echo_hub.store.tables import evaluations, nodes, rollouts, set_evaluations, steps
from echo_hub.store.touched import Touched
from echo_hub.store.training import count_trained, uncounted_steps
from echo_hub.store.writing import write
from echo_shared.books import Evaluation, RunEvent, VersionRecord

P = ParamSpec("P")
T = TypeVar("T")


class Store:
    """Made by `open`."""

    def __init__(self, engine: Engine, keeping: Keeping, *, events_kept: int = KEPT) -> None:
        self.engine = engine
        self.keeping = keeping
        self.events_kept = events_kept
        """Of each kind."""
        self.touched = Touched()
        """Nodes whose row of the leaderboard is another."""
        self.is_uncounted = False
        """A step is trained of which not all rollouts are counted."""
        self._fetched: Mapping[int, reports.Fetched] = {}
        """Of the versions that were asked for last, so that a fetch is read once."""
        self._forgotten = Place()
        """How far old fetches are gone."""

    @classmethod
    def open(
        cls, url: str, *, beside_hub: bool = False, keeping: Keeping | None = None, events_kept: int = KEPT
    ) -> Store:
        """Opens or makes the database, looks for damage and migrates it. Raises ConfigError for a bad URL, else
        StorageError.

        `beside_hub`: another process may be using it. It is never made or migrated then: ConfigError when no hub has
        made it yet, StorageError when it would have to be migrated. `keeping`: what is kept of tokens
        that the hub does not need any more; None: as by default. `events_kept`: events of each kind.
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
        """Let all reads of this thread see the state of one commit, in one transaction."""
        return one_look(self.engine)

    def read(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what `query` finds in the state of one commit."""
        with open_to_read(self.engine) as connection:
            return query(connection, *args, **kwargs)

    def write(self, command: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Carry out `command` in one transaction, which is committed when this returns."""
        with open_to_write(self.engine) as connection:
            return command(connection, *args, **kwargs)

    def apply(self, records: Sequence[Record], now: float, events: Sequence[RunEvent] = ()) -> None:
        """Commits one turn's records and what has happened meanwhile, all or none. When it returns they are on the
        disk."""
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
        """Counts some more rollouts of the steps that are trained, as long as `is_uncounted`."""
        with open_to_write(self.engine) as connection:
            counted = count_trained(connection)
            self.is_uncounted = bool(uncounted_steps(connection))
        self.touched.note(counted)

    def count_all(self) -> None:
        """Counts what the process that wrote here last has left."""
        self.is_uncounted = True
        while self.is_uncounted:
            self.count_trained()

    def prune(self, checkpoint_step: int) -> None:
        """Deletes the tokens of all steps that the oldest checkpoint kept already holds, but for copies as `keeping`
        has it, and who fetched old versions. Those of a step that is not counted yet stay until the next time."""
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
            trim(connection, self.keeping)  # The cap may be lower than when they were kept.
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
    ) -> None:
        """Notes that a node has joined, for the first time or again. Without an invite, it keeps that by which it came
        before."""
        said = {
            "public_key": public_key.hex(),
            "name": name,
            "backend": backend,
            "device": device,
            "last_seen": now,
            "cost_per_hour": cost_per_hour,
            "power_watts": power_watts,
            **({} if invite_id is None else {"invite_id": invite_id}),
        }
        with open_to_write(self.engine) as connection:
            if connection.execute(update(nodes).where(nodes.c.node_id == node_id).values(said)).rowcount == 0:
                connection.execute(insert(nodes), {"node_id": node_id, "first_seen": now, **said})
        self.touched.note([node_id])

    def record_distribution(self, news: Sequence[Release | Arrival], now: float) -> None:
        """Notes what versions that are recorded as published were announced as, and which nodes have fetched and
        verified an artefact of this run: the caller checks that it is one."""
        with open_to_write(self.engine) as connection:
            forgotten = write_news(connection, news, now, self._forgotten)
        self._forgotten = forgotten

    def record_evaluations(self, measured: Sequence[Evaluation]) -> None:
        """Records all kinds of one version at once: a version is evaluated as a whole, or it is not. Replaces older
        ones. The tokens that nodes drew for it are not needed any more."""
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
        """The `newest` published versions, in order."""
        with open_to_read(self.engine) as connection:
            published = reports.read_published(connection, newest)
            wanted = [row.policy_version for row in published]
            self._fetched = reports.read_fetched(connection, wanted, self._fetched)
            return reports.version_records(published, self._fetched)
