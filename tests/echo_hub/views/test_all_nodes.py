from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pytest
from sqlalchemy import Connection

from echo_hub.core.accounting.effects import GroupOpened, RolloutReceived, RolloutsDropped, RolloutsLeased
from echo_hub.dashboard.model import FleetView
from echo_hub.store.known_nodes import ban_nodes
from echo_hub.store.reports import read_leaderboard
from echo_hub.store.store import Store
from echo_hub.views import all_nodes, beside
from echo_hub.views import all_nodes as all_nodes_module
from echo_hub.views.all_nodes import AllNodes
from echo_shared.records.rollout import RolloutPayload
from echo_shared.records.run import LiveNode, NodeTotals
from echo_shared.wire.messages import DropReason, FinishReason

PATIENCE_S: Final = 30.0


@pytest.fixture
def long_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every read of all nodes count as slow."""
    monkeypatch.setattr(beside, "QUICK_S", -1.0)
    monkeypatch.setattr(beside, "REST", 1e9)
    monkeypatch.setattr(all_nodes, "FRESH_S", -1.0)


SAID: Final = LiveNode(activity="sampling", capacity=4, policy_version=1, tokens_per_s=2.5, precision="bf16")


def rename(store: Store, node_id: str, name: str) -> None:
    public_key = node_id.encode().ljust(32, b"_")
    store.node_seen(node_id=node_id, public_key=public_key, name=name, backend="torch", device="cpu", now=2.0)


def look(known: AllNodes, store: Store, *connected: str, leased: Mapping[str, int] | None = None) -> FleetView:
    return known.fleet(dict.fromkeys(connected, SAID), leased or {}, touched=store.touched.number)


def names(known: AllNodes, store: Store, *connected: str) -> dict[str, str]:
    return {view.totals.node_id: view.totals.name for view in look(known, store, *connected)}


@pytest.fixture
def store(hub: Any) -> Store:
    found: Store = hub.driven.store
    for node_id in ("here", "away", "gone"):
        rename(found, node_id, "first")
    return found


def test_small_books_are_read_whole_for_every_look(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "QUICK_S", 1e9)
    monkeypatch.setattr(beside, "REST", 0.0)
    known = AllNodes(store)
    assert names(known, store) == {"here": "first", "away": "first", "gone": "first"}
    rename(store, "away", "second")
    assert names(known, store)["away"] == "second"


@pytest.fixture
def asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Return a list that collects, for each view, the ids of the nodes whose rows were read singly."""
    found = list[set[str]]()

    def heard(connection: Connection, **wanted: Any) -> list[NodeTotals]:
        if "only" in wanted:
            found.append(set(wanted["only"]))
        return read_leaderboard(connection, **wanted)

    monkeypatch.setattr(all_nodes_module, "read_leaderboard", heard)
    return found


@pytest.mark.usefixtures("long_books")
def test_in_a_large_store_only_changed_nodes_are_read(store: Store, asked: list[set[str]]) -> None:
    known, by_another = AllNodes(store), Store(store.engine, store.keeping)
    names(known, store, "here", "gone")
    first = look(known, store, "here", "gone")
    again = look(known, store, "here", "gone")
    assert again.here["here"] is first.here["here"], "its row has not changed"
    asked.clear()
    rename(store, "here", "second")
    for node_id in ("away", "gone"):
        rename(by_another, node_id, "second")
    assert names(known, store, "here") == {"here": "second", "away": "first", "gone": "second"}
    assert asked == [{"here", "gone"}]
    names(known, store, "here")
    assert len(asked) == 1, "then there is nothing to read"
    rename(store, "away", "third")
    assert names(known, store, "here")["away"] == "third"


@pytest.mark.usefixtures("long_books")
def test_received_rollouts_count_before_they_are_final(store: Store) -> None:
    known = AllNodes(store)
    look(known, store, "here")
    payload = RolloutPayload(
        completion_ids=np.array([1], np.int32),
        behavior_logprobs=np.array([-1.0], np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.5,
    )
    lease = RolloutsLeased(
        lease_id=1, node_id="here", group_id=0, indices=(0, 1), turn=0, policy_version=0, deadline=99.0
    )
    came = RolloutReceived(rollout_id="1-0", received_at=2.0, payload=payload)
    store.apply([GroupOpened(group_id=0, seed=1), lease, came], now=1.0)
    assert look(known, store, "here").here["here"].totals.received == 1
    store.apply([RolloutsDropped(rollout_ids=("1-0", "1-1"), reason=DropReason.STALE)], now=2.0)
    totals = look(known, store, "here").here["here"].totals
    assert (totals.received, totals.dropped) == (1, 2)


@pytest.mark.usefixtures("long_books")
def test_new_and_banned_nodes_are_known_at_once(store: Store) -> None:
    known = AllNodes(store)
    names(known, store)
    rename(store, "new", "new")
    assert names(known, store, "new")["new"] == "new"
    store.write(ban_nodes, ["away"], now=3.0)
    banned = {view.totals.node_id for view in look(known, store) if view.banned}
    assert banned == {"away"}


@pytest.mark.usefixtures("long_books")
def test_a_slow_full_read_does_not_overwrite_newer_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    known = AllNodes(store)
    names(known, store, "gone")
    monkeypatch.setattr(beside, "REST", 0.0)
    begun, may_end = threading.Event(), threading.Event()

    def slow(connection: Connection, **wanted: Any) -> list[NodeTotals]:
        found = read_leaderboard(connection, **wanted)
        if "most" in wanted:
            begun.set()
            assert may_end.wait(PATIENCE_S)
        return found

    monkeypatch.setattr(all_nodes_module, "read_leaderboard", slow)
    rename(Store(store.engine, store.keeping), "away", "second")
    assert names(known, store, "gone")["away"] == "first", "no caller waits for it"
    assert begun.wait(PATIENCE_S)
    rename(store, "gone", "second")
    for connected in (("gone",), (), ()):
        assert names(known, store, *connected)["gone"] == "second"
    may_end.set()
    began_s = time.monotonic()
    while (shown := names(known, store))["away"] == "first":
        assert shown["gone"] == "second" and time.monotonic() < began_s + PATIENCE_S
    assert shown == {"here": "first", "away": "second", "gone": "second"}


@pytest.mark.usefixtures("long_books")
def test_the_view_of_absent_nodes_is_reused_until_it_changes(store: Store) -> None:
    known = AllNodes(store)
    names(known, store, "here")
    first = look(known, store, "here")
    assert set(first.here) == {"here"} and first.here["here"].connected
    assert first.here["here"].totals.last_seen > time.time() - 60, "it is connected at this moment"
    assert set(first.away.by_id) == {"away", "gone"} and first.away.by_id["away"].totals.last_seen == 2.0
    rename(store, "here", "second")
    second = look(known, store, "here")
    assert second.away is first.away and second.here["here"].totals.name == "second"
    both = look(known, store, "here", "away")
    assert set(both.away.by_id) == {"gone"} and both.away.by_id["gone"] is first.away.by_id["gone"]
    owes = look(known, store, "here", leased={"away": 3})
    assert (owes.here["away"].connected, owes.here["away"].in_flight) == (False, 3)
    neither = look(known, store)
    assert not neither.here and set(neither.away.by_id) == {"away", "gone", "here"}
    assert not neither.away.by_id["here"].connected
    store.write(ban_nodes, ["gone"], now=3.0)
    assert look(known, store).away.by_id["gone"].banned


async def test_the_view_has_the_nodes_totals(hub: Any) -> None:
    for node_id in ("a", "b"):
        await hub.join(node_id, capacity=100)
    await hub.train_to_the_end()
    nodes = await hub.pages.nodes()
    assert len(nodes) == 2 and sum(node.totals.share for node in nodes) == pytest.approx(1.0)
