from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.growth.turns import Heard, Turns, hearing
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.reports import read_accounting
from echo_hub.store.store import Store

NOW: Final = 1_780_000_000.0


def test_the_longest_time_of_each_statement_is_kept_for_all_parameters() -> None:
    heard = Heard()
    asked = {
        "SELECT a WHERE b IN (?, ?)": 0.1,
        "SELECT a WHERE b IN (?, ?, ?)": 0.3,
        "SELECT a WHERE b IN (%(b_1)s::VARCHAR, %(b_2)s::VARCHAR) AND c = %(c)s": 0.4,
        "DELETE": 0.2,
    }
    for sql, seconds in asked.items():
        heard.note(sql, seconds)
    assert heard.worst == {
        "SELECT a WHERE b IN (...)": 0.3,
        "SELECT a WHERE b IN (...) AND c = %(c)s": 0.4,
        "DELETE": 0.2,
    }


async def test_a_step_is_written_in_turns_and_all_that_the_writer_asks_is_heard(tmp_path: Path) -> None:
    store = AsyncStore(Store.open(f"sqlite:///{tmp_path / 'echo.db'}"))
    turns = Turns(store=store, nodes=["a", "b"], groups_per_step=4, step=1, lease_id=1, group_id=0, now=NOW)
    with hearing(store.store.engine) as heard:
        await turns.work()
        await turns.fetched_by_all()
        await turns.keep_house()
        store.store.read(read_accounting)
    accounting = store.store.read(read_accounting)
    assert (accounting.leased, accounting.trained, accounting.in_flight) == (32, 30, 0) and accounting.balanced
    (version,) = store.store.versions_history(9)
    assert sum(version.fetches_by_transport.values()) == 2
    kinds = {sql.split(maxsplit=1)[0] for sql in heard.worst}
    assert kinds >= {"SELECT", "INSERT", "UPDATE"}
    assert not [sql for sql in heard.worst if sql.startswith("SELECT count(*)")], "pages query on separate threads"
    assert (turns.step, turns.lease_id, turns.group_id) == (2, 17, 4)
    await store.close()
