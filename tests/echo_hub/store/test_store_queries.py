"""What the store asks its database for costs as much on the run's last day as on its first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.event import listen, remove

from echo_hub.actions.records import Actor
from echo_hub.actions.requests import Ban, MakeInvite, MakeToken, Pardon, Pause, RevokeInvite, RevokeToken, Unban
from echo_hub.core.effects import (
    RECORDS,
    ActionSettled,
    CheckingCredited,
    CheckRecorded,
    CoarseClassesRecorded,
    CostAccrued,
    GroupDropped,
    GroupsRated,
    NodeCost,
    Record,
    RolloutsDropped,
    RolloutsEvaluated,
    ScoreRecorded,
    SettingRecorded,
    StandingRecorded,
    TrustDecided,
)
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.spread.holdings import Arrival, Release
from echo_hub.core.trust.numerics import CoarseClass, NumericsClass
from echo_hub.core.trust.standing import Decision, StandingRow
from echo_hub.store import browsing, old_fetches, training
from echo_hub.store.actions import ActionBooks
from echo_hub.store.browsing import NEWEST
from echo_hub.store.credit_store import CreditStore
from echo_hub.store.database import connect
from echo_hub.store.retired import Mark, Span
from echo_hub.store.retiring import Retirement
from echo_hub.store.store import Store
from echo_hub.store.tables import metadata
from echo_shared.books import Evaluation, EvaluationKind, EventFilter, Invite, RunEvent
from echo_shared.credit_books import BoardQuery
from echo_shared.messages import Checked, DropReason, Fetched, TeamWanted, Way
from echo_shared.rollout_books import RolloutFilter
from echo_shared.run_credit import NodeCredit, RunCredit

ADA: Final = Invite(name="Ada", token_hash="a", max_keys=1, created_at=1.0, expires_at=2.0)
BOOKS: Final = (Store, CreditStore, ActionBooks, Retirement)
FEW, MANY = 20, 320
"""Steps of one group of two."""

AT_OPENING: Final = {"evaluated_versions", "came_by"}
"""Asked for once, when the hub starts; these may take as long as the run is."""

WHOLE: Final = {
    ("leaderboard", "nodes"): "a row a node: it shows every node",
    ("leaderboard", "tallies"): "a row a node and outcome: it shows every node",
    ("leaderboard", "costs"): "a row a node: it shows every node",
    ("leaderboard", "checking"): "a row a node: it shows every node",
    ("leaderboard", "trust"): "a row a node: it shows every node",
    ("leaderboard", "invites"): "a row a person who was invited: it shows whose invite each node came by",
    ("num_nodes", "nodes"): "a row a node: their number",
    ("num_nodes", "tallies"): "a row a node and outcome: the nodes' number",
    ("num_nodes", None): "PostgreSQL counts by an index, and names no table for that",
    ("credits", "nodes"): "a row a node: it ranks every node that was of use",
    ("credits", "tallies"): "a row a node and outcome: it ranks every node that was of use",
    ("costs", "costs"): "a row a node that ever cost something: their sum",
    ("accounting", "outcome_tallies"): "a row an outcome",
    ("apply", "outcome_tallies"): "a row an outcome",
    ("count_all", "outcome_tallies"): "a row an outcome",
    ("leaderboard", "outcome_tallies"): "a row an outcome",
    ("node_record", "outcome_tallies"): "a row an outcome",
    ("apply", "uncounted"): "a row a part of a step that is not counted yet: some, for moments",
    ("prune", "uncounted"): "a row a part of a step that is not counted yet",
    ("count_trained", "uncounted"): "a row a part of a step that is not counted yet",
    ("count_all", "uncounted"): "a row a part of a step that is not counted yet",
    ("versions_by_transport", "fetch_tallies"): "a row a transport",
    ("useful_nodes", "tallies"): "a row a node and outcome: it names every node that was of use",
    ("counted_names", "nodes"): "a row a node: it names every node that was of use",
    ("counted_names", "tallies"): "a row a node and outcome: it names every node that was of use",
    ("run_meta", "run_meta"): "a row a setting",
    ("snapshot", "trust"): "a row a node that was ever checked",
    ("kept_totals", "keeping_tallies"): "four rows: kept, and why not",
    ("apply", "keeping_tallies"): "four rows: kept, and why not",
    ("prune", "keeping_tallies"): "four rows: kept, and why not",
    ("record_evaluations", "keeping_tallies"): "four rows: kept, and why not",
    ("add_invite", "invites"): "a row a person who was invited",
    ("invites", "invites"): "a row a person who was invited",
    ("num_invites", "invites"): "a row a person who was invited: their number",
    ("revoke_invite", "invites"): "a row a person who was invited",
    ("revoke_invite", "nodes"): "a row a node: an operator's command, now and then",
    ("board", "teams"): "a row a team: it ranks every team",
    ("board", None): "PostgreSQL counts teams by an index",
    ("board", "runs_elsewhere"): "a row a run of other hubs: whether there is one",
    ("team", "teams"): "a row a team: it ranks every team",
    ("own_team", "teams"): "a row a team: it ranks every team",
    ("own_team", None): "PostgreSQL counts teams by an index",
    ("change_team", "teams"): "a row a team: their number",
    ("change_team", None): "PostgreSQL counts teams by an index",
    ("known_hubs", "runs_elsewhere"): "a row a run of other hubs: a command, now and then",
    ("note", "invites"): "a row a person who was invited",
    ("note", "nodes"): "a row a node: an operator's action, now and then",
    ("note", "api_tokens"): "a row a token of an operator's",
    ("tokens", "api_tokens"): "a row a token of an operator's",
    ("num_tokens", "api_tokens"): "a row a token of an operator's: their number",
    ("settings", "live_settings"): "a row a setting",
    ("begin", "live_settings"): "a row a setting",
}
"""Who may read which table as a whole: none of these grows with rollouts, leases, fetches or steps."""

WHOLE_RUN: Final = {"step_shares": "a node's page shows the steps of the whole run"}
"""What grows with the run, by its meaning."""

PARTIAL: Final = {index.name for table in metadata.tables.values() for index in table.indexes if index.dialect_kwargs}
"""Indexes of few rows of their tables."""


@dataclass(frozen=True)
class Filled:
    """A run of so many steps in a database, and what is asked of it next."""

    url: str
    steps: int
    records: Any

    def fill(self) -> None:
        store = Store.open(self.url, events_kept=FEW)
        for node_id in "abc":
            self._join(store, node_id)
        done = range(1, self.steps + 1)
        store.apply([r for step in done for r in self.records.one_step(step, lease_id=step, group_id=step - 1)], 1.0)
        store.record_distribution([self._arrival(node_id, step) for step in done for node_id in "abc"], 1.0)
        for version in done[::10]:
            self._evaluate(store, version)
        store.apply([], 1.0, events=[_event() for _ in done])
        books = ActionBooks(store)
        for _ in done:
            books.note(Pause(), Actor(via="cli", who="ada"), now=1.0)
        for action in books.wanted():
            books.settle(ActionSettled(number=action.number, done=True), now=1.0)
        store.prune(self.steps - 2)
        store.close()

    def calls(self, store: Store) -> Mapping[str, Callable[[], object]]:
        """One of each of the store's public methods, as the hub calls them every day."""
        newest = self.steps
        ids = [f"{newest}-0", f"{newest}-1"]
        return {
            "apply": lambda: self._one_of_each_record(store),
            "count_trained": store.count_trained,
            "count_all": lambda: self._count_large_step(store),
            "snapshot": store.snapshot,
            "receipts": lambda: store.receipts("a", ids),
            "load_payloads": lambda: store.load_payloads(ids),
            "load_turns": lambda: store.load_turns({(newest - 1, 0), (newest - 1, 1)}),
            "load_draws": lambda: store.load_draws(ids),
            "load_batch": lambda: store.load_batch(newest),
            "load_groups": lambda: store.load_groups({newest: ids}),
            "load_evaluated": lambda: store.load_evaluated(newest),
            "prune": lambda: store.prune(newest - 1),
            "node_seen": lambda: self._join(store, "a"),
            "nodes_still_here": lambda: store.nodes_still_here(["a", "b"], now=2.0),
            "ban": lambda: store.ban(["a"], now=2.0),
            "unban": lambda: store.unban(["a"]),
            "banned_nodes": store.banned_nodes,
            "want_pardon": lambda: store.want_pardon(["a"], now=2.0),
            "wanted_pardons": store.wanted_pardons,
            "useful_nodes": store.useful_nodes,
            "add_invite": lambda: store.add_invite(ADA),
            "invites": store.invites,
            "num_invites": store.num_invites,
            "came_by": store.came_by,
            "revoke_invite": lambda: store.revoke_invite("Ada", now=2.0, ban=True),
            "record_distribution": lambda: store.record_distribution(
                [self._release(newest), self._arrival("d", newest)], now=1.0
            ),
            "record_evaluations": lambda: self._evaluate(store, newest + 10),
            "set_run_meta": lambda: store.set_run_meta("run_id", "r"),
            "run_meta": store.run_meta,
            "leaderboard": store.leaderboard,
            "contribution": lambda: store.contribution("a", run_id="r", run_name="R", hub_key=bytes(32), now=2.0),
            "credits": lambda: store.credits(["a", "b"]),
            "counted_names": store.counted_names,
            "num_nodes": store.num_nodes,
            "under_way": store.under_way,
            "accounting": store.accounting,
            "costs": store.costs,
            "steps_history": lambda: store.steps_history(newest - 3),
            "newest_step": store.newest_step,
            "versions_history": lambda: store.versions_history(5),
            "versions_by_transport": store.versions_by_transport,
            "recent_rollouts": lambda: store.recent_rollouts(6),
            "recent_lengths": lambda: store.recent_lengths(6),
            "recent_ages": lambda: store.recent_ages(3),
            "recent_spreads": lambda: store.recent_spreads(3),
            "node_kinds": lambda: store.node_kinds(["a", "b"]),
            "evaluations": lambda: store.evaluations(1e9),
            "evaluated_versions": store.evaluated_versions,
            "find_rollouts": lambda: self._find_all_ways(store),
            "rollout_tokens": lambda: store.rollout_tokens([(newest, 0), (1, 0)]),
            "rollout_group": lambda: store.rollout_group(newest - 1),
            "batch_rewards": lambda: store.batch_rewards(newest),
            "kept_totals": store.kept_totals,
            "events": lambda: self._find_events(store),
            "node_record": lambda: store.node_record("a"),
            **self._credit_calls(CreditStore(store.engine)),
            **self._action_calls(ActionBooks(store)),
            **self._retirement_calls(Retirement(store)),
        }

    def _retirement_calls(self, books: Retirement) -> Mapping[str, Callable[[], object]]:
        """Of a step behind the newest of which the tokens are pruned."""
        step = self.steps - 6
        span = Span(after=Mark(step=step - 1, group=step - 2), through=Mark(step=step, group=step - 1))
        return {
            "beginning": books.beginning,
            "last": books.last,
            "ripe": lambda: books.ripe(span.after, step + 3),
            "keys": lambda: books.keys(span),
            "groups": lambda: books.groups(span),
            "summaries": lambda: books.summaries([step - 1]),
            "trained_at": lambda: books.trained_at(step),
            "retire": lambda: books.retire([(step, 0), (step, 1)], span),
        }

    def _credit_calls(self, store: CreditStore) -> Mapping[str, Callable[[], object]]:
        run = {"run_id": "r", "run_name": "R", "hub_key": bytes(32)}
        elsewhere = RunCredit(
            run_id="s",
            run_name="S",
            hub_key=bytes(32).hex(),
            issued_at="2026-01-01T00:00:00Z",
            nodes=(NodeCredit(node_id="a", node_name="a", rollouts=1, tokens=2),),
        )
        return {
            "change_team": lambda: [
                store.change_team("a", TeamWanted(action=action, name="A team"), now=2.0)
                for action in ("create", "leave", "create", "join", "show")
            ],
            "board": lambda: [
                store.board(wanted, now=2.0)
                for wanted in (BoardQuery(), BoardQuery(kind="team"), BoardQuery(search="a", team="A team"))
            ],
            "credited_node": lambda: store.credited_node("a", now=2.0),
            "step_shares": lambda: store.step_shares("a", width=10),
            "public_receipt": lambda: store.public_receipt(self.steps, 0),
            "team": lambda: store.team("A team", now=2.0),
            "own_team": lambda: store.own_team("a", now=2.0),
            "run_credit": lambda: store.run_credit(**run, now=2.0),
            "known_hubs": store.known_hubs,
            "take_in_credit": lambda: store.take_in_credit(elsewhere, now=2.0),
            "remove_team": lambda: store.remove_team("A team"),
        }

    def _action_calls(self, books: ActionBooks) -> Mapping[str, Callable[[], object]]:
        by = Actor(via="cli", who="ada")
        requests = (
            Pause(),
            Ban(node="a"),
            Unban(node="a"),
            Pardon(node="a"),
            MakeInvite(name="Bo"),
            RevokeInvite(name="Bo"),
            MakeToken(name="Bo"),
            RevokeToken(name="Bo"),
        )
        return {
            "note": lambda: [books.note(request, by, now=2.0) for request in requests],
            "settle": lambda: books.settle(ActionSettled(number=1, done=True), now=2.0),
            "find": lambda: books.find(1),
            "wanted": books.wanted,
            "log": lambda: (books.log(limit=3), books.log(limit=3, before=self.steps)),
            "was_undone": lambda: books.was_undone(1),
            "tokens": books.tokens,
            "num_tokens": books.num_tokens,
            "settings": books.settings,
            "begin": lambda: books.begin({"learning_rate": 0.5}),
        }

    @staticmethod
    def _find_events(store: Store) -> None:
        for wanted in (
            EventFilter(),
            EventFilter(kind="node_joined"),
            EventFilter(severity="error"),
            EventFilter(subject="a"),
            EventFilter(before=9),
        ):
            store.events(wanted, limit=3)

    def _find_all_ways(self, store: Store) -> None:
        """By each index, and with conditions that have none."""
        for wanted in (
            RolloutFilter(),
            RolloutFilter(step=self.steps),
            RolloutFilter(group=self.steps - 1),
            RolloutFilter(node="a"),
            RolloutFilter(version=self.steps),
            RolloutFilter(drop="stale"),
            RolloutFilter(check="failed"),
        ):
            store.find_rollouts(wanted, NEWEST, 5)
            if wanted != RolloutFilter():
                store.find_rollouts(replace(wanted, state="dropped", reward_min=0.5, tokens_max=9), NEWEST, 5)

    def _one_of_each_record(self, store: Store) -> None:
        evaluation = EvaluationGroup(policy_version=self.steps, greedy=True, number=0).group_id
        lease, group = self.steps + 1_000, self.steps + 1_000
        turns: Sequence[Record] = [
            *self.records.opened(group + 1, evaluation),
            self.records.leased(lease + 1, group + 1, 0, 1),
            self.records.leased(lease + 2, evaluation, 0),
            *self.records.received(f"{lease + 1}-0", f"{lease + 2}-0"),
            ScoreRecorded(
                rollout_id=f"{lease + 1}-0", reward=None, observation_ids=self.records.payload(2).completion_ids
            ),
            ScoreRecorded(rollout_id=f"{lease + 2}-0", reward=1.0),
            RolloutsEvaluated(rollout_ids=(f"{lease + 2}-0",)),
            RolloutsDropped(rollout_ids=(f"{lease + 1}-0", f"{lease + 1}-1"), reason=DropReason.STALE),
            GroupsRated(pass_rates=((group + 1, 0.5),)),
            GroupDropped(group_id=group + 1, reason=DropReason.STALE),
            CostAccrued(nodes=(NodeCost("a", 5.0, 0.125), NodeCost("b", 5.0, 0.25))),
            CheckRecorded(rollout_id=f"{lease + 2}-0", checked=Checked.PASSED),
            StandingRecorded(row=StandingRow(node_id="a", num_verified=3)),
            CoarseClassesRecorded(classes=(CoarseClass(NumericsClass("torch", "bf16", "cuda"), 0.25, 0.5),)),
            CheckingCredited(node_id="a", num_tokens=9),
            TrustDecided(node_id="a", decision=Decision.PARDONED, reason="", decided_at=1.0),
            SettingRecorded(setting="max_staleness", stored=3),
            ActionSettled(number=1, done=True),
        ]
        records = [*self.records.one_step(self.steps + 1, lease_id=lease, group_id=group), *turns]
        assert {type(record) for record in records} == set(RECORDS)
        store.apply(records, now=1.0, events=[_event()])

    def _count_large_step(self, store: Store) -> None:
        step = 10 * self.steps
        store.apply(self.records.large_step(step, num_groups=training.COUNTED_AT_ONCE), now=1.0)
        store.count_all()

    @staticmethod
    def _join(store: Store, node_id: str) -> None:
        store.node_seen(node_id=node_id, public_key=bytes(32), name=node_id, backend="torch", device="cpu", now=1.0)

    @staticmethod
    def _release(version: int) -> Release:
        return Release(policy_version=version, adapter_bytes=9, payload_bytes=7, carrier="delta", way=Way.SWARM)

    @staticmethod
    def _arrival(node_id: str, version: int) -> Arrival:
        fetched = Fetched(
            info_hash=version.to_bytes(20), policy_version=version, seconds=1.0, swarm_bytes=7, web_seed_bytes=0
        )
        return Arrival(node_id=node_id, fetched=fetched, broadcast_s=1.0)

    @staticmethod
    def _evaluate(store: Store, version: int) -> None:
        store.record_evaluations(
            [
                Evaluation(
                    policy_version=version,
                    kind=EvaluationKind.GREEDY,
                    num_problems=4,
                    samples=1,
                    num_unscored=0,
                    accuracy=0.5,
                    accuracy_error=0.125,
                    pass_at={},
                    mean_reward=0.5,
                    mean_tokens=3.0,
                    share_truncated=0.25,
                    seconds=2.0,
                    evaluated_at=float(version),
                )
            ]
        )


def _event() -> RunEvent:
    return RunEvent(at=1.0, kind="node_joined", subject="a", text="a has joined")


@contextmanager
def statements_of(calls: Mapping[str, Callable[[], object]]) -> Iterator[list[tuple[str, str, Any]]]:
    """Carries out each call; what it asked the database for: the call's name, the statement, one set of parameters."""
    heard: list[tuple[str, str, Any]] = []
    name = ""

    def hear(_connection: Any, _cursor: Any, sql: str, given: Any, _context: Any, many: bool) -> None:
        if re.match(r"SELECT|UPDATE|DELETE", sql):
            heard.append((name, sql, given[0] if many else given))

    listen(Engine, "before_cursor_execute", hear)
    try:
        for name, call in calls.items():  # noqa: B007
            call()
    finally:
        remove(Engine, "before_cursor_execute", hear)
    yield heard


def stops_early(sql: str) -> bool:
    """It reads an index from one end, and ends after a few rows; the second test below shows that it does."""
    return re.search(r"ORDER BY \S+ DESC\s+LIMIT \S+( OFFSET \S+)?\s*(\) AS \w+|$)", sql) is not None


def walks_all(node: Mapping[str, Any]) -> bool:
    """A node of PostgreSQL's plan that reads a whole table, or a whole index of all its rows."""
    whole_index = "Index Cond" not in node and node.get("Index Name") not in {None, *PARTIAL}
    return node["Node Type"] == "Seq Scan" or whole_index


def test_every_public_method_is_tried(tmp_path: Path, records: Any) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    of_each = [{name for name in vars(kind) if not name.startswith("_")} for kind in BOOKS]
    public = set().union(*of_each) - {"open", "close", "one_look", "begin_at"}  # That is for empty books.
    assert len(public) == sum(map(len, of_each)) - 4, "of each name there is one"
    assert set(Filled(url="", steps=1, records=records).calls(store)) == public
    assert AT_OPENING | {name for name, _ in WHOLE} <= public
    assert {table for _, table in WHOLE if table} <= metadata.tables.keys()
    store.close()


def test_no_daily_statement_scans_a_table_that_grows(tmp_path: Path, records: Any) -> None:
    run = Filled(url=f"sqlite:///{tmp_path / 'echo.db'}", steps=FEW, records=records)
    run.fill()
    store, engine = Store.open(run.url), connect(run.url)
    scans = set()
    with statements_of(run.calls(store)) as heard, engine.connect() as connection:
        for name, sql, given in heard:
            if name in AT_OPENING or stops_early(sql):
                continue
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", given):
                table = re.match(r"SCAN (\w+)(?: USING INDEX (\w+))?", row.detail)
                if table is None or table[1] not in metadata.tables or table[2] in PARTIAL:
                    continue
                if (name, table[1]) not in WHOLE:
                    scans.add(f"{name}: {row.detail}: {' '.join(sql.split())}")
    assert {name for name, _, _ in heard} == run.calls(store).keys(), "every method asks for something"
    assert not scans, "\n".join(sorted(scans))
    engine.dispose()
    store.close()


def test_postgresql_finds_an_index_for_every_daily_statement(postgresql_url: str, records: Any) -> None:
    """Of tables so small it would read all by itself; told not to, it does so only where it has no index."""
    engine = connect(postgresql_url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    run = Filled(url=postgresql_url, steps=FEW, records=records)
    run.fill()
    store = Store.open(run.url)
    scans = set()
    with statements_of(run.calls(store)) as heard, engine.connect() as connection:
        connection.execute(text("SET enable_seqscan = off"))
        for name, sql, given in heard:
            if name in AT_OPENING or stops_early(sql):
                continue
            plans = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {sql}", given).scalar_one()
            nodes = [plan["Plan"] for plan in plans]
            for node in nodes:
                nodes += node.get("Plans", [])
                if walks_all(node) and (name, node.get("Relation Name")) not in WHOLE:
                    scans.add(f"{name}: {node['Node Type']} on {node.get('Relation Name')}: {' '.join(sql.split())}")
    assert not scans, "\n".join(sorted(scans))
    store.close()
    engine.dispose()


def test_a_run_sixteen_times_as_long_costs_no_more_a_call(
    tmp_path: Path, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in SQLite's own instructions: a search that walks half an index looks like any other in a plan."""
    for name in ("LOOKED_AT", "LOOKED_BACK"):
        monkeypatch.setattr(browsing, name, 2 * FEW)  # As many as the shorter run has.
    monkeypatch.setattr(old_fetches, "KEPT_VERSIONS", FEW // 2)  # Both have some to forget.
    costs: dict[int, Counter[str]] = {}
    for steps in (FEW, MANY):
        run = Filled(url=f"sqlite:///{tmp_path / f'{steps}.db'}", steps=steps, records=records)
        run.fill()
        costs[steps] = _instructions(run)
    grown = {name: (few, costs[MANY][name]) for name, few in costs[FEW].items() if costs[MANY][name] > 1.5 * few}
    assert {name: cost for name, cost in grown.items() if name not in AT_OPENING | WHOLE_RUN.keys()} == {}


def _instructions(run: Filled) -> Counter[str]:
    done: Counter[str] = Counter()
    name = ""

    def count() -> int:
        done[name] += 1
        return 0

    def prepare(connection: Any, _record: Any) -> None:
        connection.set_progress_handler(count, 1)

    listen(Engine, "connect", prepare)
    try:
        store = Store.open(run.url)
        for name, call in run.calls(store).items():  # noqa: B007
            call()
        store.close()
    finally:
        remove(Engine, "connect", prepare)
    del done[""]
    return done
