from __future__ import annotations

import threading
import time
from typing import Any, Final

import pytest

from echo_hub.store.store import Store
from echo_hub.views import all_nodes, beside
from echo_hub.views.all_nodes import AllNodes
from echo_shared.books import NodeTotals

PATIENCE_S: Final = 30.0


@pytest.fixture
def long_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read them all takes long."""
    monkeypatch.setattr(beside, "QUICK_S", -1.0)
    monkeypatch.setattr(beside, "REST", 1e9)
    monkeypatch.setattr(all_nodes, "FRESH_S", -1.0)


class Said:
    activity, capacity, policy_version, tokens_per_s, precision = "sampling", 4, 1, 2.5, "bf16"
    cost_per_hour, standby, affordable = 0.0, "", True


def rename(store: Store, node_id: str, name: str) -> None:
    public_key = node_id.encode().ljust(32, b"_")
    store.node_seen(node_id=node_id, public_key=public_key, name=name, backend="torch", device="cpu", now=2.0)


def names(known: AllNodes, *connected: str) -> dict[str, str]:
    views = known.fleet({node_id: Said() for node_id in connected}, {})
    return {view.totals.node_id: view.totals.name for view in views}


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
    assert names(known) == {"here": "first", "away": "first", "gone": "first"}
    rename(store, "away", "second")
    assert names(known)["away"] == "second"


@pytest.mark.usefixtures("long_books")
def test_of_long_books_those_of_the_connected_are_read_and_of_who_was_connected_before(store: Store) -> None:
    known = AllNodes(store)
    names(known, "here", "gone")
    for node_id in ("here", "away", "gone"):
        rename(store, node_id, "second")
    assert names(known, "here") == {"here": "second", "away": "first", "gone": "second"}
    rename(store, "here", "third")
    assert names(known, "here")["here"] == "third"


@pytest.mark.usefixtures("long_books")
def test_who_is_new_and_who_is_banned_is_known_at_once(store: Store) -> None:
    known = AllNodes(store)
    names(known)
    rename(store, "new", "new")
    assert names(known, "new")["new"] == "new"
    store.ban(["away"], now=3.0)
    banned = {view.totals.node_id for view in known.fleet({}, {}) if view.banned}
    assert banned == {"away"}


@pytest.mark.usefixtures("long_books")
def test_the_whole_is_read_beside_and_takes_nothing_back_that_was_read_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = AllNodes(store)
    names(known, "gone")
    monkeypatch.setattr(beside, "REST", 0.0)
    read, begun, may_end = store.leaderboard, threading.Event(), threading.Event()

    def slow(**wanted: Any) -> list[NodeTotals]:
        found = read(**wanted)
        if "most" in wanted:
            begun.set()
            assert may_end.wait(PATIENCE_S)
        return found

    monkeypatch.setattr(store, "leaderboard", slow)
    rename(store, "away", "second")
    assert names(known, "gone")["away"] == "first", "nobody waits for it"
    assert begun.wait(PATIENCE_S)
    rename(store, "gone", "second")
    for connected in (("gone",), (), ()):
        assert names(known, *connected)["gone"] == "second"
    may_end.set()
    began_s = time.monotonic()
    while (shown := names(known))["away"] == "first":
        assert shown["gone"] == "second" and time.monotonic() < began_s + PATIENCE_S
    assert shown == {"here": "first", "away": "second", "gone": "second"}


@pytest.mark.usefixtures("long_books")
def test_those_that_are_away_are_the_same_until_one_of_them_is_another(store: Store) -> None:
    known = AllNodes(store)
    names(known, "here")
    first = known.fleet({"here": Said()}, {})
    assert set(first.here) == {"here"} and first.here["here"].connected
    assert first.here["here"].totals.last_seen > time.time() - 60, "it is seen at this moment"
    assert set(first.away.by_id) == {"away", "gone"} and first.away.by_id["away"].totals.last_seen == 2.0
    rename(store, "here", "second")
    second = known.fleet({"here": Said()}, {})
    assert second.away is first.away and second.here["here"].totals.name == "second"
    both = known.fleet({"here": Said(), "away": Said()}, {})
    assert set(both.away.by_id) == {"gone"} and both.away.by_id["gone"] is first.away.by_id["gone"]
    owes = known.fleet({"here": Said()}, {"away": 3})
    assert (owes.here["away"].connected, owes.here["away"].in_flight) == (False, 3)
    neither = known.fleet({}, {})
    assert not neither.here and set(neither.away.by_id) == {"away", "gone", "here"}
    assert not neither.away.by_id["here"].connected
    store.ban(["gone"], now=3.0)
    assert known.fleet({}, {}).away.by_id["gone"].banned


async def test_the_hub_knows_what_its_nodes_have_done(hub: Any) -> None:
    for node_id in ("a", "b"):
        await hub.join(node_id, capacity=100)
    await hub.train_to_the_end()
    nodes = await hub.pages.nodes()
    assert len(nodes) == 2 and sum(node.totals.share for node in nodes) == pytest.approx(1.0)
