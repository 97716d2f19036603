"""The hub's books on disk: what the coordinator records, what nodes are, and what pages count.

Synchronous. The hub writes from one thread; another process that writes (`echo-hub ban`) waits its turn. Reads
may run beside it on other threads (SQLite in WAL mode and PostgreSQL both give each read the state of one commit).
Every method is one transaction, and raises StorageError when the database cannot do it: locked, damaged, disk full,
its server away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Final

from sqlalchemy import Connection, Engine, delete, insert, select, update

from echo_hub.core.effects import Record
from echo_hub.core.evaluation_groups import evaluation_ids
from echo_hub.core.snapshot import CoordinatorSnapshot
from echo_hub.core.spread.holdings import Arrival, Release
from echo_hub.store import browsing, invites, lost_commits, reading, recent, recent_work, reports, standings
from echo_hub.store.arrivals import write_news
from echo_hub.store.beginnings import Beginning, begin_at
from echo_hub.store.browsing import BatchReward, Found, StoredGroup, StoredTokens
from echo_hub.store.bulk import among
from echo_hub.store.changing import key_of
from echo_hub.store.contribution import read_contribution
from echo_hub.store.credits import Credit, read_credits
from echo_hub.store.database import (
    check_migrated,
    check_undamaged,
    connect,
    migrate,
    one_look,
    open_to_read,
    open_to_write,
    storage_errors,
    write_meta,
)
from echo_hub.store.drawing import StoredDraw, read_draws
from echo_hub.store.events import KEPT, add_events, read_events
from echo_hub.store.keeping import Keeping, KeptTotals, forget, read_kept_totals, trim
from echo_hub.store.node_records import read_node_record
from echo_hub.store.old_fetches import Place, forget_old_fetches
from echo_hub.store.reading import AnsweredTurn, BatchGroup, EvaluatedEpisode, StoredPayload
from echo_hub.store.recent import NodeKind, RecentRollout, Spread
from echo_hub.store.recent_work import BatchAges, Length
from echo_hub.store.retired import read_last
from echo_hub.store.tables import evaluations, nodes, rollouts, run_meta, set_evaluations, steps
from echo_hub.store.tallies import useful_nodes
from echo_hub.store.touched import Touched
from echo_hub.store.training import count_trained, uncounted_steps
from echo_hub.store.unfinished import read_snapshot
from echo_hub.store.writing import write
from echo_shared.books import (
    Accounting,
    CostTotals,
    CountedName,
    Evaluation,
    EventFilter,
    Invite,
    NodeTotals,
    NumNodes,
    RunEvent,
    StepRecord,
    VersionRecord,
)
from echo_shared.contribution import Contribution
from echo_shared.messages import Receipt
from echo_shared.node_books import NodeRecord
from echo_shared.rollout_books import RolloutFilter

SEEN_A_STATEMENT: Final = 64


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
        """All that this thread reads within is the state of one commit, and costs one transaction."""
        return one_look(self.engine)

    # --- the coordinator's books

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

    def snapshot(self) -> CoordinatorSnapshot:
        """All that is unfinished, for a new coordinator."""
        with open_to_read(self.engine) as connection:
            return read_snapshot(connection)

    def receipts(self, node_id: str, rollout_ids: Sequence[str]) -> list[Receipt]:
        """What became of a node's rollouts, in the order asked for; what is not its own is dropped as invalid."""
        with open_to_read(self.engine) as connection:
            return reading.read_receipts(connection, node_id, rollout_ids)

    def contribution(
        self, node_id: str, *, run_id: str, run_name: str, hub_key: bytes, now: float
    ) -> Contribution | None:
        """What a node has done for the run; None: it was never here."""
        with open_to_read(self.engine) as connection:
            return read_contribution(connection, node_id, run_id=run_id, run_name=run_name, hub_key=hub_key, now=now)

    def load_payloads(self, rollout_ids: Sequence[str]) -> list[StoredPayload]:
        """Payloads in the order asked for; those dropped meanwhile are left out."""
        with open_to_read(self.engine) as connection:
            return reading.read_payloads(connection, rollout_ids)

    def load_turns(self, episodes: Collection[tuple[int, int]]) -> dict[tuple[int, int], tuple[AnsweredTurn, ...]]:
        """The answered turns of each unfinished episode (group id, index), in order."""
        with open_to_read(self.engine) as connection:
            return reading.read_turns(connection, episodes)

    def load_draws(self, rollout_ids: Sequence[str]) -> list[StoredDraw]:
        """What is to be checked, in the order asked for; those whose tokens are not kept any more are left out."""
        with open_to_read(self.engine) as connection:
            return read_draws(connection, rollout_ids)

    def load_batch(self, step: int) -> list[BatchGroup]:
        """The planned batch of a step, in the order of training. Raises StorageError when it is pruned."""
        with open_to_read(self.engine) as connection:
            return reading.read_batch(connection, step)

    def load_groups(self, wanted: Mapping[int, Sequence[str]]) -> list[BatchGroup]:
        """Groups with these of their rollouts, in the orders given; those dropped meanwhile are left out."""
        with open_to_read(self.engine) as connection:
            return reading.read_groups(connection, wanted)

    def load_evaluated(self, policy_version: int) -> list[EvaluatedEpisode]:
        """All ended episodes of an evaluation by nodes whose result is not recorded yet."""
        with open_to_read(self.engine) as connection:
            return reading.read_evaluated(connection, policy_version)

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

    # --- nodes, fetches, evaluations

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

    def nodes_still_here(self, node_ids: Sequence[str], now: float) -> None:
        """Brings `last_seen` of connected nodes up to date."""
        if node_ids:
            with open_to_write(self.engine) as connection:
                for start in range(0, len(node_ids), SEEN_A_STATEMENT):
                    part = among(connection, nodes.c.node_id, node_ids[start : start + SEEN_A_STATEMENT])
                    connection.execute(update(nodes).where(part).values(last_seen=now))

    def ban(self, node_ids: Collection[str], now: float) -> None:
        """Bans these nodes from now on; of those that are banned already nothing changes. Other processes than the
        hub's may say so: no other method writes this."""
        with open_to_write(self.engine) as connection:
            ban_nodes(connection, node_ids, now)

    def unban(self, node_ids: Collection[str]) -> None:
        """Lets these nodes take part again. Other processes than the hub's may call it, as `ban`."""
        with open_to_write(self.engine) as connection:
            connection.execute(update(nodes).where(nodes.c.node_id.in_(node_ids)).values(banned_at=None))

    def banned_nodes(self) -> frozenset[str]:
        with open_to_read(self.engine) as connection:
            return frozenset(connection.scalars(select(nodes.c.node_id).where(nodes.c.banned_at.is_not(None))))

    def useful_nodes(self) -> frozenset[str]:
        """Nodes that have drawn a rollout which was trained on, or measured."""
        with open_to_read(self.engine) as connection:
            return useful_nodes(connection)

    def counted_names(self) -> list[CountedName]:
        """Return the names of nodes whose work has counted, in the order in which the nodes were first seen."""
        with open_to_read(self.engine) as connection:
            useful = useful_nodes(connection)
            every = select(nodes.c.node_id, nodes.c.name, nodes.c.invite_id)
            found = connection.execute(every.order_by(nodes.c.first_seen, nodes.c.node_id))
            return [CountedName(*row) for row in found if row.node_id in useful]

    def want_pardon(self, node_ids: Collection[str], now: float) -> None:
        """The operator wants these quarantined nodes to begin anew. Other processes than the hub's may say so, as
        `ban`; the hub does it as soon as it runs."""
        with open_to_write(self.engine) as connection:
            standings.want_pardon(connection, node_ids, now)

    def wanted_pardons(self) -> frozenset[str]:
        """Nodes whose pardon is wanted and not recorded yet."""
        with open_to_read(self.engine) as connection:
            return standings.wanted_pardons(connection)

    def add_invite(self, invite: Invite) -> bool:
        """Its number is given here. False: one of that name is there and not revoked, and nothing was added. Other
        processes than the hub's make and revoke invites, as `ban`."""
        with open_to_write(self.engine) as connection:
            return invites.add_invite(connection, invite)

    def revoke_invite(self, name: str, now: float, *, ban: bool = False) -> list[str]:
        """Nobody comes by this person's invites any more. `ban`: whoever came by them is banned. Their nodes."""
        with open_to_write(self.engine) as connection:
            invites.revoke_invite(connection, name, now)
            of_person = invites.nodes_of(connection, name)
            if ban:
                ban_nodes(connection, of_person, now)
        return of_person

    def num_invites(self) -> tuple[int, int]:
        """Made and revoked: other numbers than before mean that `invites` has changed."""
        with open_to_read(self.engine) as connection:
            return invites.read_num_invites(connection)

    def invites(self) -> list[Invite]:
        """All that were ever made, oldest first."""
        with open_to_read(self.engine) as connection:
            return invites.read_invites(connection)

    def came_by(self) -> dict[str, int]:
        """The invite of each node that has one, in the order in which they first came. The hub alone writes them."""
        with open_to_read(self.engine) as connection:
            return invites.came_by(connection)

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

    def set_run_meta(self, key: str, value: str) -> None:
        """Remembers something of the run: its id, its settings."""
        with open_to_write(self.engine) as connection:
            write_meta(connection, key, value)

    def begin_at(self, beginning: Beginning, lineage: str, now: float) -> None:
        """The run starts with a version that it was given: once, before anything else is in its books."""
        with open_to_write(self.engine) as connection:
            begin_at(connection, beginning, lineage, now)

    def run_meta(self) -> dict[str, str]:
        with open_to_read(self.engine) as connection:
            return {row.key: row.value for row in connection.execute(select(run_meta))}

    # --- for the pages

    def leaderboard(
        self, *, most: int | None = None, always: Collection[str] = (), only: Collection[str] | None = None
    ) -> list[NodeTotals]:
        """Every node, or `most` and those of `always`, or those of `only`; most trained rollouts first, counted from
        receipts."""
        with open_to_read(self.engine) as connection:
            return reports.read_leaderboard(connection, most=most, always=always, only=only)

    def under_way(self) -> dict[str, int]:
        """Rollouts of each node that have come in and are not final."""
        with open_to_read(self.engine) as connection:
            return reports.read_under_way(connection)

    def credits(self, node_ids: Collection[str]) -> dict[str, Credit]:
        """What these nodes have done over all time, and their ranks among all."""
        with open_to_read(self.engine) as connection:
            return read_credits(connection, node_ids)

    def num_nodes(self) -> NumNodes:
        """In all the books."""
        with open_to_read(self.engine) as connection:
            return reports.read_num_nodes(connection)

    def costs(self) -> CostTotals:
        """What all nodes together have cost."""
        with open_to_read(self.engine) as connection:
            return reports.read_costs(connection)

    def accounting(self) -> Accounting:
        with open_to_read(self.engine) as connection:
            return reports.read_accounting(connection)

    def steps_history(self, since: int = 0, limit: int = 1_000) -> list[StepRecord]:
        """The first `limit` trained steps after step `since`, in order."""
        with open_to_read(self.engine) as connection:
            return reports.read_steps(connection, since, limit)

    def newest_step(self) -> StepRecord | None:
        """The last trained step; None before the first."""
        with open_to_read(self.engine) as connection:
            return reports.read_newest_step(connection)

    def versions_history(self, newest: int) -> list[VersionRecord]:
        """The `newest` published versions, in order."""
        with open_to_read(self.engine) as connection:
            published = reports.read_published(connection, newest)
            wanted = [row.policy_version for row in published]
            self._fetched = reports.read_fetched(connection, wanted, self._fetched)
            return reports.version_records(published, self._fetched)

    def versions_by_transport(self) -> dict[str, int]:
        """Fetches of policy versions over all nodes, by where most bytes came from; the base model is not counted."""
        with open_to_read(self.engine) as connection:
            return reports.read_versions_by_transport(connection)

    def recent_rollouts(self, newest: int) -> list[RecentRollout]:
        """The rollouts that were leased last, newest first."""
        with open_to_read(self.engine) as connection:
            return recent.read_recent_rollouts(connection, newest)

    def recent_spreads(self, newest: int) -> list[Spread]:
        """How long the newest published versions took to the nodes, newest first."""
        with open_to_read(self.engine) as connection:
            return recent.read_spreads(connection, newest)

    def recent_lengths(self, newest: int) -> list[Length]:
        """How long the completions were that were leased last, newest first, each with what became of it."""
        with open_to_read(self.engine) as connection:
            return recent_work.read_lengths(connection, newest)

    def recent_ages(self, newest: int) -> list[BatchAges]:
        """How stale the groups of the newest steps were, newest first."""
        with open_to_read(self.engine) as connection:
            return recent_work.read_batch_ages(connection, newest)

    def node_kinds(self, node_ids: Iterable[str]) -> dict[str, NodeKind]:
        """What nodes say that they are, as far as they have ever joined."""
        with open_to_read(self.engine) as connection:
            return recent.read_node_kinds(connection, node_ids)

    def evaluations(self, since: float = 0.0) -> list[Evaluation]:
        """The evaluations made after `since`, in the order of versions, the run's own before those of its sets, greedy
        before sampled."""
        with open_to_read(self.engine) as connection:
            return reports.read_evaluations(connection, since)

    def find_rollouts(self, wanted: RolloutFilter, before: tuple[int, int], limit: int) -> Found:
        """At most `limit` rollouts that were leased before `before` (lease, index), the newest first; `wanted.text` is
        not looked for."""
        with open_to_read(self.engine) as connection:
            return browsing.find_rollouts(connection, wanted, before, limit)

    def rollout_tokens(self, keys: Collection[tuple[int, int]]) -> dict[tuple[int, int], StoredTokens]:
        """What was drawn of these rollouts, by lease and index, as far as it is there."""
        with open_to_read(self.engine) as connection:
            return browsing.read_tokens(connection, keys)

    def rollout_group(self, group_id: int) -> StoredGroup | None:
        """All that was ever leased of a group; None: nothing."""
        with open_to_read(self.engine) as connection:
            return browsing.read_group(connection, group_id)

    def node_record(self, node_id: str) -> NodeRecord | None:
        """All that is known of one node; None: it never joined, and nothing was ever leased to it."""
        with open_to_read(self.engine) as connection:
            return read_node_record(connection, node_id)

    def batch_rewards(self, step: int) -> list[BatchReward]:
        """The ends of all episodes of a step's batch."""
        with open_to_read(self.engine) as connection:
            return browsing.read_batch_rewards(connection, step)

    def events(self, wanted: EventFilter, limit: int) -> list[RunEvent]:
        """At most `limit` of the events that fit, the newest first."""
        with open_to_read(self.engine) as connection:
            return read_events(connection, wanted, limit)

    def kept_totals(self) -> KeptTotals:
        """What of final rollouts' tokens is there to read."""
        with open_to_read(self.engine) as connection:
            last = read_last(connection)
            return replace(read_kept_totals(connection), retired_step=0 if last is None else last.through.step)

    def evaluated_versions(self) -> set[int]:
        with open_to_read(self.engine) as connection:
            return reports.read_evaluated_versions(connection)


def ban_nodes(connection: Connection, node_ids: Collection[str], now: float) -> None:
    """Of those that are banned already nothing changes."""
    of_these = nodes.c.node_id.in_(node_ids)
    connection.execute(update(nodes).where(of_these, nodes.c.banned_at.is_(None)).values(banned_at=now))
