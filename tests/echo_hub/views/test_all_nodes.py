from __future__ import annotations

from typing import Any

import pytest

from echo_hub.store.store import Store
from echo_hub.views import all_nodes
from echo_hub.views.all_nodes import AllNodes


@pytest.fixture
def long_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read them all takes long."""
    monkeypatch.setattr(all_nodes, "QUICK_S", -1.0)
    monkeypatch.setattr(all_nodes, "REST", 1e9)
    monkeypatch.setattr(all_nodes, "FRESH_S", -1.0)


def rename(store: Store, node_id: str, name: str) -> None:
    public_key = node_id.encode().ljust(32, b"_")
    store.node_seen(node_id=node_id, public_key=public_key, name=name, backend="torch", device="cpu", now=2.0)


def names(known: AllNodes, *connected: str) -> dict[str, str]:
    views = known.views(dict.fromkeys(connected), {})  # type: ignore[arg-type]  # Nobody asks what they said.
    return {view.totals.node_id: view.totals.name for view in views}


@pytest.fixture
def store(hub: Any) -> Store:
    found: Store = hub.driven.store
    for node_id in ("here", "away", "gone"):
        rename(found, node_id, "first")
    return found


def test_small_books_are_read_whole_for_every_look(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_nodes, "QUICK_S", 1e9)
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
    banned = {view.totals.node_id for view in known.views({}, {}) if view.banned}
    assert banned == {"away"}


@pytest.mark.usefixtures("long_books")
async def test_what_has_not_changed_is_the_same_and_the_order_is_the_shares(hub: Any) -> None:
    for node_id in ("a", "b"):
        await hub.join(node_id, capacity=100)
    await hub.train_to_the_end()
    known = AllNodes(hub.driven.store)
    views = known.views({}, {})
    assert all(after is before for after, before in zip(known.views({}, {}), views, strict=True))
    shares = [view.totals.share for view in views]
    assert max(shares) > 0 and shares == sorted(shares, reverse=True)
