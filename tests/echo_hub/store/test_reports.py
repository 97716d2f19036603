from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echo_hub.core.accounting.effects import RolloutsDropped, VersionRecorded
from echo_hub.spread.holdings import Arrival, Release
from echo_hub.store.known_nodes import ban_nodes, note_still_here, read_banned_nodes, unban_nodes
from echo_hub.store.reports import (
    read_accounting,
    read_evaluated_versions,
    read_evaluations,
    read_leaderboard,
    read_newest_step,
    read_num_nodes,
    read_steps,
    read_versions_by_transport,
)
from echo_hub.store.store import Store
from echo_hub.store.tallies import SOURCES, TRANSPORTS
from echo_shared.records.run import Evaluation, EvaluationKind, NumNodes
from echo_shared.wire.messages import DropReason, Fetched, Way


def join(store: Store, node_id: str, now: float, name: str = "") -> None:
    store.node_seen(
        node_id=node_id,
        public_key=bytes(range(32)),
        name=name or f"{node_id}'s",
        backend="torch",
        device="cpu",
        now=now,
    )


def fetched(
    version: int | None,
    swarm_bytes: int = 0,
    web_seed_bytes: int = 0,
    *,
    shared_memory_bytes: int = 0,
    pushed_bytes: int = 0,
    mesh_bytes: int = 0,
) -> Fetched:
    return Fetched(
        info_hash=(version or 0).to_bytes(20),
        policy_version=version,
        seconds=1.0,
        swarm_bytes=swarm_bytes,
        web_seed_bytes=web_seed_bytes,
        shared_memory_bytes=shared_memory_bytes,
        pushed_bytes=pushed_bytes,
        mesh_bytes=mesh_bytes,
    )


def test_the_leaderboard_counts_receipts(store: Store, records: Any) -> None:
    join(store, "a", 1.0)
    join(store, "idle", 2.0)
    store.apply(records.one_step(1, lease_id=1, group_id=0, node_id="a"), now=1.0)
    store.apply(records.one_step(2, lease_id=2, group_id=1, node_id="hub"), now=1.0)
    store.apply(records.one_step(3, lease_id=3, group_id=2, node_id="a"), now=1.0)
    store.apply([*records.opened(3), records.leased(4, 3, 0, 1), *records.received("4-0")], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("4-0",), reason=DropReason.STALE)], now=1.0)
    first, second, third = store.read(read_leaderboard)
    assert (first.node_id, first.name, first.trained_rollouts, first.trained_tokens) == ("a", "a's", 4, 10)
    assert (first.received, first.dropped) == (5, 1)
    assert (first.first_seen, first.last_seen, first.backend, first.device) == (1.0, 1.0, "torch", "cpu")
    assert (second.node_id, second.name, second.trained_rollouts) == ("hub", "hub", 2)
    assert first.share + second.share == pytest.approx(1.0)
    assert (third.node_id, third.trained_rollouts, third.share, third.received) == ("idle", 0, 0.0, 0)


def test_of_many_nodes_the_foremost_the_newest_and_the_wanted_are_read(store: Store, records: Any) -> None:
    for number, node_id in enumerate(("a", "old", "wanted", "new")):
        join(store, node_id, float(number))
    for step, node_id in enumerate(("a", "b", "a"), start=1):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1, node_id=node_id), now=1.0)
    every = {row.node_id: row for row in store.read(read_leaderboard)}
    assert every.keys() == {"a", "b", "old", "wanted", "new"}
    for most, found in ((1, ["a", "wanted"]), (3, ["a", "b", "new", "wanted"])):
        rows = store.read(read_leaderboard, most=most, always=["wanted"])
        assert rows == [every[node_id] for node_id in found], "shares are computed over all rollouts"
    assert store.read(read_num_nodes) == NumNodes(known=4, useful=2)


def test_an_empty_run_has_no_leaders(store: Store) -> None:
    assert store.read(read_leaderboard) == []


def test_a_node_that_joins_again_keeps_its_first_day(store: Store) -> None:
    join(store, "a", 1.0, "old name")
    join(store, "a", 5.0, "new name")
    store.write(note_still_here, ["a", "unknown"], 9.0)
    store.write(note_still_here, [], 10.0)
    (row,) = store.read(read_leaderboard)
    assert (row.name, row.first_seen, row.last_seen) == ("new name", 1.0, 9.0)


def test_a_ban_lasts_until_it_is_lifted(store: Store) -> None:
    for node_id in ("a", "b", "c"):
        join(store, node_id, 1.0)
    assert store.read(read_banned_nodes) == frozenset()
    store.write(ban_nodes, ["a", "b", "never joined"], now=5.0)
    store.write(ban_nodes, ["b"], now=6.0)
    assert store.read(read_banned_nodes) == {"a", "b"}
    join(store, "a", 7.0)
    assert {row.node_id: row.banned_at for row in store.read(read_leaderboard)} == {"a": 5.0, "b": 5.0, "c": None}
    store.write(unban_nodes, ["a", "c"])
    assert store.read(read_banned_nodes) == {"b"}
    store.write(ban_nodes, ["a"], now=8.0)
    assert {row.node_id: row.banned_at for row in store.read(read_leaderboard)} == {"a": 8.0, "b": 5.0, "c": None}


def test_accounting_says_where_every_rollout_is(store: Store, records: Any) -> None:
    store.apply(records.one_step(1, lease_id=1, group_id=0), now=1.0)
    store.apply([*records.opened(1), records.leased(2, 1, 0, 1), records.leased(3, 1, 0, 1)], now=1.0)
    store.apply(records.received("2-0"), now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("3-0",), reason=DropReason.DUPLICATE)], now=1.0)
    books = store.read(read_accounting)
    assert (books.leased, books.trained, books.num_dropped, books.in_flight) == (6, 2, 1, 3)
    assert books.dropped == {"duplicate": 1} and books.balanced


def test_the_history_of_steps(store: Store, records: Any) -> None:
    assert store.read(read_newest_step) is None
    for step in (1, 2, 3):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1), now=1.0)
    assert [step.step for step in store.read(read_steps, since=1)] == [2, 3]
    assert [step.step for step in store.read(read_steps, limit=2)] == [1, 2], "oldest first"
    assert store.read(read_steps, since=2**53) == []
    assert store.read(read_newest_step) == store.read(read_steps)[-1]
    first = store.read(read_steps)[0]
    assert (first.num_groups, first.num_rollouts, first.num_tokens, first.mean_reward) == (1, 2, 5, 0.5)
    assert (first.planned_at, first.trained_at, first.staleness_mean, first.staleness_max) == (20.0, 31.0, 0.0, 0)
    known = {key: value for key, value in first.figures.items() if value is not None}
    assert known == {"loss": 0.25, "seconds": 11.0}, (
        "without a reported duration, a step's time is from its plan to its end"
    )


def test_versions_and_how_they_travelled(store: Store, records: Any) -> None:
    for step in (1, 2):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1), now=1.0)
    release = Release(policy_version=1, adapter_bytes=100, payload_bytes=80, carrier="delta", way=Way.BROADCAST)
    store.record_distribution([release, replace(release, policy_version=7)], now=1.0)
    said = (
        ("a", None, fetched(None, 0, 500)),
        ("a", 0.5, fetched(1, 90, 10)),
        ("b", 0.25, fetched(1, 10, 90)),
        ("c", None, fetched(1, shared_memory_bytes=80)),
        ("d", 0.125, fetched(1, pushed_bytes=60, mesh_bytes=20)),
        ("e", 1.0, fetched(1, pushed_bytes=80)),
    )
    store.record_distribution([Arrival(node_id=n, fetched=fetch, broadcast_s=s) for n, s, fetch in said], now=1.0)
    first, second = store.versions_history(newest=30)
    assert (first.policy_version, first.published_at) == (1, 41.0)
    assert first.fetches_by_transport == dict.fromkeys(TRANSPORTS, 1)
    sizes = {"swarm": 100, "web_seed": 100, "shared_memory": 80, "pushed": 140, "mesh": 20}
    assert first.bytes_by_transport == sizes
    seconds = (first.dissemination_p50_s, first.dissemination_p95_s, first.dissemination_max_s)
    assert seconds == (0.25, 1.0, 1.0), "quantiles over the fetches told at the announcement: 0.125, 0.25, 0.5 and 1"
    assert (first.payload_bytes, first.carrier, first.way) == (80, "delta", "broadcast")
    assert (second.policy_version, second.fetches_by_transport, second.dissemination_p50_s) == (2, {}, None)
    assert (second.payload_bytes, second.carrier, second.way) == (None, None, None)
    assert store.read(read_versions_by_transport) == dict.fromkeys(TRANSPORTS, 1)
    assert store.versions_history(newest=1) == [second]
    assert store.versions_history(newest=0) == []


def test_the_first_fetch_of_an_artefact_counts(store: Store) -> None:
    store.apply([VersionRecorded(policy_version=1, published_at=1.0)], now=1.0)
    for said in (
        fetched(1, 100),
        fetched(1, 0, 5_000),
        fetched(2**31 - 1, 1),
        fetched(None, 1),
    ):
        store.record_distribution([Arrival(node_id="a", fetched=said, broadcast_s=0.5)], now=1.0)
    repeated = fetched(1).model_copy(update={"policy_version": 7})
    store.record_distribution([Arrival(node_id="a", fetched=repeated, broadcast_s=0.25)], now=2.0)
    (version,) = store.versions_history(newest=30)
    assert (version.dissemination_max_s, version.fetches_by_transport) == (0.5, {"swarm": 1})
    assert version.bytes_by_transport == dict.fromkeys(SOURCES, 0) | {"swarm": 100}
    assert store.read(read_versions_by_transport) == dict.fromkeys(TRANSPORTS, 0) | {"swarm": 2}


def evaluated(version: int, accuracy: float, *, kind: EvaluationKind = EvaluationKind.GREEDY, at: float) -> Evaluation:
    samples = 8 if kind is EvaluationKind.SAMPLED else 1
    return Evaluation(
        policy_version=version,
        kind=kind,
        num_problems=10,
        samples=samples,
        num_unscored=1,
        accuracy=accuracy,
        accuracy_error=0.125,
        pass_at={2: 0.5, 8: 0.75} if samples > 1 else {},
        mean_reward=0.625,
        mean_tokens=12.5,
        share_truncated=0.25,
        seconds=3.5,
        evaluated_at=at,
    )


def test_evaluations_are_kept_by_version_and_kind(store: Store) -> None:
    base = [evaluated(0, 0.25, at=2.0), evaluated(0, 0.2, kind=EvaluationKind.SAMPLED, at=2.0)]
    store.record_evaluations([evaluated(5, 0.5, at=1.0)])
    store.record_evaluations(base)
    store.record_evaluations([newer := evaluated(5, 0.75, at=3.0)])
    assert store.read(read_evaluations) == [*base, newer]
    assert store.read(read_evaluations, since=2.0) == [newer]
    assert store.read(read_evaluated_versions) == {0, 5}
    assert base[0].text == "greedy 25.0% ± 12.5%"
    assert base[1].text == "mean@8 20.0% ± 12.5%, pass@8 75.0%"


def test_each_step_lists_the_drops_before_it(store: Store, records: Any) -> None:
    store.apply([*records.opened(8, 9), records.leased(8, 8, 0, 1), records.leased(9, 9, 0, 1)], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("8-0",), reason=DropReason.EXPIRED)], now=1.0)
    store.apply(records.one_step(1, lease_id=1, group_id=0), now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("8-1", "9-0"), reason=DropReason.EXPIRED)], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("9-1",), reason=DropReason.STALE)], now=1.0)
    store.apply(records.one_step(2, lease_id=2, group_id=1), now=1.0)
    assert [step.dropped for step in store.read(read_steps)] == [{"expired": 1}, {"expired": 3, "stale": 1}]
