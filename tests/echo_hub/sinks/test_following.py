"""Sinks that work, fail and hang, fed from a real store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest

from echo_hub.dashboard.source import Changes
from echo_hub.sinks import following
from echo_hub.sinks.base import Entry, Position
from echo_hub.sinks.following import Following
from echo_hub.sinks.reading import Reading
from echo_hub.store.store import Store
from echo_shared.errors import DATABASE_AWAY
from echo_shared.room import Room
from tests.echo_hub.written_steps import train


class Odd:
    """Notes what it is told; fails or hangs where it is asked to."""

    name = "Odd"

    def __init__(self, *, opening: str = "", writing: str = "", closing: str = "") -> None:
        self.odd = {"open": opening, "write": writing, "close": closing}
        self.steps: list[int] = []
        self.calls: list[str] = []
        self.called = asyncio.Condition()

    async def _do(self, what: str) -> None:
        async with self.called:
            self.calls.append(what)
            self.called.notify_all()
        if self.odd[what] == "hangs":
            await asyncio.Event().wait()
        if self.odd[what] == "fails":
            raise ZeroDivisionError("no\nluck")

    async def open(self) -> Position:
        await self._do("open")
        return Position(step=self.steps[-1] if self.steps else 0)

    async def write(self, entries: Sequence[Entry], position: Position) -> None:
        await self._do("write")
        self.steps += [entry.policy_version for entry in entries]
        assert position.step == self.steps[-1]

    async def close(self) -> None:
        await self._do("close")

    async def until(self, *calls: str) -> None:
        async with asyncio.timeout(60), self.called:
            await self.called.wait_for(lambda: self.calls[-len(calls) :] == list(calls))


@asynccontextmanager
async def followed(sink: Odd, store: Store, changes: Changes) -> AsyncIterator[Following]:
    one = Following(sink, partial(Reading, store), Room(code=DATABASE_AWAY))
    task = asyncio.create_task(one.run(changes))
    yield one
    task.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait([task])
    assert task.cancelled()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"WRITE_EVERY_S": 0.0, "AGAIN_S": 0.01, "OPEN_S": 0.2, "WRITE_S": 0.2, "CLOSE_S": 0.2}.items():
        monkeypatch.setattr(following, name, seconds)


async def test_a_sink_follows_the_run(store: Store) -> None:
    train(store, 1)
    sink, changes = Odd(), Changes()
    async with followed(sink, store, changes) as one:
        await sink.until("open", "write")
        train(store, 2)
        changes.notify()
        await sink.until("write", "write")
        assert one.problem is None
    assert sink.steps == [1, 2] and sink.calls[-1] == "close"


@pytest.mark.parametrize("where", ["opening", "writing"])
@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_what_fails_or_hangs_is_said_once_and_tried_again(
    store: Store, caplog: pytest.LogCaptureFixture, where: str, how: str
) -> None:
    caplog.set_level(logging.INFO, logger="echo_hub")
    train(store, 1)
    sink, changes = Odd(**{where: how}), Changes()
    async with followed(sink, store, changes) as one:
        tried = ["open"] if where == "opening" else ["open", "write"]
        await sink.until(*tried, "close", *tried, "close", *tried, "close")
        assert one.problem is not None and one.problem.startswith("Odd gets no figures; the run goes on without it")
        assert "Look at its settings: " in one.problem, "and what to do"
        assert one.problem.endswith("no luck" if how == "fails" else "it takes too long")
        assert changes.number >= 2, "the pages hear of it"
        sink.odd = dict.fromkeys(sink.odd, "")
        async with asyncio.timeout(60):
            while one.problem is not None:
                await changes.wait(changes.number)
    assert sink.steps == [1]
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" the run")[0] for text in said] == ["Odd gets no figures;", "Odd gets"]


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_sink_that_cannot_be_closed_does_not_hold_up_the_end(store: Store, how: str) -> None:
    train(store, 1)
    sink = Odd(closing=how)
    async with followed(sink, store, Changes()):
        await sink.until("open", "write")
    assert sink.steps == [1] and sink.calls[-1] == "close"
