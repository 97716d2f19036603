from __future__ import annotations

import inspect
import threading
from pathlib import Path

from sqlalchemy import event

from echo_hub.store.async_store import AsyncStore
from echo_hub.store.store import Store


async def test_every_call_is_made_on_the_one_thread(tmp_path: Path) -> None:
    store = AsyncStore(Store.open(f"sqlite:///{tmp_path / 'echo.db'}"))
    threads: set[str] = set()
    event.listen(store.store._engine, "commit", lambda connection: threads.add(threading.current_thread().name))
    await store.set_run_meta("a", "1")
    await store.set_run_meta("b", "2")
    assert await store.run_meta() == {"a": "1", "b": "2"}
    assert len(threads) == 1 and threads != {threading.current_thread().name}
    await store.close()


def test_each_method_is_the_stores_of_that_name() -> None:
    for name, method in inspect.getmembers(AsyncStore, inspect.iscoroutinefunction):
        if not name.startswith("_"):
            mine, theirs = (list(inspect.signature(each).parameters) for each in (method, getattr(Store, name)))
            assert mine == theirs, name
