"""A sink (writer of metrics) follows a run in a real store. A sink that fails or hangs is reported and stops
nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from echo_hub.dashboard.source import Changes
from echo_hub.sinks import following
from echo_hub.sinks.following import Following
from echo_hub.sinks.reading import Entry, Position
from echo_hub.store.store import Store
from echo_shared.errors import DATABASE_AWAY
from echo_shared.files.full_disk import Room
from tests.echo_hub.written_steps import train


class Odd:
    """A sink that records its calls and checks that none overlap. On request it fails, or hangs until it is
    released.
    """

    name = "Odd"

    def __init__(self, *, opening: str = "", writing: str = "", closing: str = "") -> None:
        self.odd = {"open": opening, "write": writing, "close": closing}
        self.steps: list[int] = []
        self.calls: list[str] = []
        self.called = threading.Condition()
        self.released = threading.Event()
        self.busy = threading.Lock()

    def _do(self, what: str) -> None:
        with self.called:
            self.calls.append(what)
            self.called.notify_all()
        if self.odd[what] == "hangs":
            self.released.wait(60)
        if self.odd[what] == "fails":
            raise ZeroDivisionError("no\nluck")

    def open(self) -> Position:
        assert self.busy.acquire(blocking=False), "no two calls at once"
        try:
            self._do("open")
            return Position(step=self.steps[-1] if self.steps else 0)
        finally:
            self.busy.release()

    def write(self, entries: Sequence[Entry], position: Position) -> None:
        assert self.busy.acquire(blocking=False), "no two calls at once"
        try:
            self._do("write")
            self.steps += [entry.policy_version for entry in entries]
            assert position.step == self.steps[-1]
        finally:
            self.busy.release()

    def close(self) -> None:
        self._do("close")

    async def until(self, *calls: str) -> None:
        def wait() -> bool:
            with self.called:
                return self.called.wait_for(lambda: self.calls[-len(calls) :] == list(calls), 60)

        assert await asyncio.to_thread(wait)


@asynccontextmanager
async def followed(writer: Odd, store: Store, changes: Changes) -> AsyncIterator[Following]:
    one = Following(writer, store, Room(code=DATABASE_AWAY), changes)
    task = asyncio.create_task(one.run())
    yield one
    task.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait([task])
    writer.released.set()
    assert task.cancelled()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"WRITE_EVERY_S": 0.0, "AGAIN_S": 0.01, "SLOW_S": 0.2, "CLOSE_S": 0.2}.items():
        monkeypatch.setattr(following, name, seconds)


async def test_a_writer_follows_the_run(store: Store) -> None:
    train(store, 1)
    writer, changes = Odd(), Changes()
    async with followed(writer, store, changes) as one:
        await writer.until("open", "write")
        train(store, 2)
        changes.notify()
        await writer.until("write", "write")
        assert one.problem is None
    assert writer.steps == [1, 2] and writer.calls[-1] == "close"


async def until_cured(one: Following, changes: Changes) -> None:
    async with asyncio.timeout(60):
        while one.problem is not None:
            await changes.wait(changes.number)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().partition(" the run")[0] for record in caplog.records]


@pytest.mark.parametrize("where", ["opening", "writing"])
async def test_a_failure_is_reported_once_and_tried_again(
    store: Store, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    caplog.set_level(logging.INFO, logger="echo_hub")
    train(store, 1)
    writer, changes = Odd(**{where: "fails"}), Changes()
    async with followed(writer, store, changes) as one:
        tried = ["open"] if where == "opening" else ["open", "write"]
        await writer.until(*tried, "close", *tried, "close", *tried, "close")
        assert one.problem is not None and one.problem.startswith("Odd gets no figures; the run continues without it")
        assert one.problem.endswith("Check its settings: no luck"), "and what to do"
        assert changes.number >= 1, "the pages hear of it"
        writer.odd = dict.fromkeys(writer.odd, "")
        await until_cured(one, changes)
    assert writer.steps == [1]
    assert said(caplog) == ["Odd gets no figures;", "Odd gets"]


@pytest.mark.parametrize("where", ["opening", "writing"])
async def test_a_call_that_hangs_is_reported_and_waited_for(
    store: Store, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    caplog.set_level(logging.INFO, logger="echo_hub")
    train(store, 1)
    writer, changes = Odd(**{where: "hangs"}), Changes()
    async with followed(writer, store, changes) as one:
        async with asyncio.timeout(60):
            await changes.wait(0)
        assert one.problem is not None and one.problem.endswith("Check its settings: a call takes too long")
        writer.released.set()
        await until_cured(one, changes)
        assert writer.calls == ["open", "write"], "nothing was called again"
    assert writer.steps == [1]
    assert said(caplog) == ["Odd gets no figures;", "Odd gets"]


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_writer_that_cannot_be_closed_does_not_hold_up_the_end(store: Store, how: str) -> None:
    train(store, 1)
    writer = Odd(closing=how)
    async with followed(writer, store, Changes()):
        await writer.until("open", "write")
    assert writer.steps == [1] and writer.calls[-1] == "close"
