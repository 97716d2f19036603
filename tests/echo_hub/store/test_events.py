from __future__ import annotations

import time

import pytest

from echo_hub.store.events import read_events
from echo_hub.store.store import Store
from echo_shared.errors import StorageError
from echo_shared.records.run import EventFilter, RunEvent, Severity


def event(kind: str, text: str = "x", **fields: object) -> RunEvent:
    return RunEvent(at=1.5, kind=kind, text=text, **fields)  # type: ignore[arg-type]


def texts(store: Store, limit: int = 99, **wanted: object) -> list[str]:
    return [found.text for found in store.read(read_events, EventFilter(**wanted), limit)]  # type: ignore[arg-type]


def test_events_are_numbered_and_read_back_newest_first(store: Store) -> None:
    data = {"name": "ä", "rate": 0.5, "none": None, "yes": True}
    first = event("node_joined", "a joined", subject="n1", data=data)
    store.apply([], 1.0, [first, event("log", severity=Severity.ERROR)])
    newest, oldest = store.read(read_events, EventFilter(), 9)
    assert (newest.kind, newest.severity, newest.warning) == ("log", Severity.ERROR, True)
    assert newest.number > oldest.number > 0
    assert oldest == RunEvent(
        number=oldest.number, at=1.5, kind="node_joined", subject="n1", text="a joined", data=data
    )


def test_events_are_committed_with_their_turn_or_not_at_all(store: Store, records: type) -> None:
    store.apply(records.opened(1), 1.0, [event("log", "together")])
    with pytest.raises(StorageError, match="cannot be written"):
        store.apply(records.opened(1), 1.0, [event("log", "never")])
    assert texts(store) == ["together"]


def test_events_are_found_by_kind_severity_subject_and_page(store: Store) -> None:
    severities = (Severity.INFO, Severity.WARNING, Severity.ERROR)
    made = [event("ab"[n % 2], str(n), severity=severities[n % 3], subject="s" if n > 3 else "") for n in range(6)]
    store.apply([], 1.0, made)
    assert texts(store) == ["5", "4", "3", "2", "1", "0"]
    assert texts(store, kind="a") == ["4", "2", "0"]
    assert texts(store, severity="warning") == ["5", "4", "2", "1"] and texts(store, severity="error") == ["5", "2"]
    assert texts(store, subject="s", severity="error") == ["5"]
    first = store.read(read_events, EventFilter(), 4)
    assert texts(store, before=first[-1].number) == ["1", "0"]


def test_a_flood_of_one_kind_of_event_removes_no_other_kind(store: Store) -> None:
    store.events_kept = 100
    store.apply([], 1.0, [event("node_banned", "banned")])
    for turn in range(30):
        store.apply([], 1.0, [event("node_joined", f"{turn}-{number}") for number in range(20)])
    assert texts(store, limit=999, kind="node_joined")[0] == "29-19"
    assert len(texts(store, limit=999, kind="node_joined")) == 100
    assert texts(store, kind="node_banned") == ["banned"]


def test_a_full_table_costs_a_turn_little(store: Store) -> None:
    kinds = [f"kind_{number}" for number in range(20)]
    store.apply([], 1.0, [event(kind) for kind in kinds for _ in range(2_000)])
    began = time.perf_counter()
    for _ in range(20):
        store.apply([], 1.0, [event("kind_7")])
    assert (time.perf_counter() - began) / 20 < 0.1
    assert len(store.read(read_events, EventFilter(), 10**6)) == 40_000
