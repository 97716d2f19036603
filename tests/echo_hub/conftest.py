"""A real coordinator with a real store and driver. Actions for the learner, the nodes and the scorer
succeed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import numpy as np
import pytest
from sqlalchemy import Engine, text

from benchmarks.harness.postgresql import PostgreSQL, lacking, postgresql
from echo_hub.core.accounting.effects import Action, PrepareGroup, PublishVersion, ScoreRollout, SendLease, TrainStep
from echo_hub.core.accounting.events import (
    Event,
    GroupPrepared,
    NodeConnected,
    NodeReported,
    RolloutArrived,
    RolloutScored,
    StepDone,
    VersionPublished,
)
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.dashboard.source import Changes
from echo_hub.driving.driver import Driver
from echo_hub.driving.event_queue import EventQueue
from echo_hub.driving.progress import RunProgress
from echo_hub.run.directory import RunDirectory
from echo_hub.scoring.backlog import Backlog
from echo_hub.store import store as store_module
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.database import check_undamaged, connect, migrate
from echo_hub.store.store import Store
from echo_hub.store.unfinished import read_snapshot
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import FinishReason, rollout_id
from tests.echo_hub.judge_endpoint import FakeEndpoint, served

_T = TypeVar("_T")
ANSWERS: dict[type, Callable[[Any], Event]] = {
    PrepareGroup: lambda action: GroupPrepared(
        group_id=action.group_id, seed=100 + action.group_id, prompt=action.group_id
    ),
    ScoreRollout: lambda action: RolloutScored(
        rollout_id=action.rollout_id, reward=float(action.rollout_id.endswith("-1"))
    ),
    TrainStep: lambda action: StepDone(step=action.step, metrics={"loss": 0.5, "train_s": 1.5, "surprise": 1.25}),
    PublishVersion: lambda action: VersionPublished(policy_version=action.policy_version),
}
"""Successful answer to each kind of action that the coordinator requests."""


class Driven:
    """A coordinator with two rollouts per group and two groups per step; actions whose types are in `answered` succeed
    at once, without the test's help.
    """

    def __init__(self, directory: RunDirectory, **settings: Any) -> None:
        self.store = Store.open(directory.database_url)
        base: dict[str, Any] = {"mode": "async", "steps": 2, "groups_per_step": 2, "group_size": 2, "deadline_s": 60.0}
        chosen = CoordinatorSettings(**{**base, "max_staleness": 1, "first_window": 100, **settings})
        self.now = 1_000.0
        self.actions: list[Action] = []
        self.answered: set[type] = {PrepareGroup, ScoreRollout}
        self.look: Callable[[Action], None] = lambda action: None
        """Function that is called with each action that the driver carries out."""
        self.async_store = AsyncStore(self.store)
        self.queue, self.progress, self.backlog = EventQueue(), RunProgress(last_version=2, evaluated=()), Backlog()
        self.pages = Changes()
        self.driver = Driver(
            coordinator=Coordinator(chosen, self.store.read(read_snapshot)),
            store=self.async_store,
            queue=self.queue,
            progress=self.progress,
            backlog=self.backlog,
            changes=self.pages,
            clock=lambda: self.now,
        )
        self._changes = Changes()
        self._answers: asyncio.Queue[Event] = asyncio.Queue()

    def handle(self, action: Action) -> None:
        """Record an action instead of carrying it out as the hub's services do."""
        self.look(action)
        self.actions.append(action)
        if type(action) in self.answered:
            self._answers.put_nowait(ANSWERS[type(action)](action))
        self._changes.notify()

    def of(self, kind: type[_T]) -> list[_T]:
        return [action for action in self.actions if isinstance(action, kind)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is tested after each action."""
        async with asyncio.timeout(60):
            while not condition():
                await self._changes.wait(self._changes.number)

    async def answer(self) -> None:
        """Report the automatic answers to the driver, until cancelled."""
        while True:
            await self.queue.put(await self._answers.get())

    async def node(self, node_id: str, *, capacity: int = 100, version: int = 0) -> None:
        await self.queue.put(NodeConnected(node_id=node_id))
        await self.queue.put(NodeReported(node_id=node_id, capacity=capacity, policy_version=version))

    async def deliver(self, lease: SendLease) -> None:
        for index in lease.indices:
            await self.queue.put(self.arrival(lease, index))

    async def work(
        self, done: Callable[[], bool], deliver: Callable[[SendLease], Awaitable[None]] | None = None
    ) -> None:
        """Deliver the results of every lease that is sent, until `done` returns True."""
        delivered = 0

        def news() -> bool:
            return done() or len(self.of(SendLease)) > delivered

        while not done():
            await self.until(news)
            for lease in self.of(SendLease)[delivered:]:
                delivered += 1
                await (deliver or self.deliver)(lease)

    @staticmethod
    def arrival(lease: SendLease, index: int) -> RolloutArrived:
        return RolloutArrived(
            node_id=lease.node_id,
            rollout_id=rollout_id(lease.lease_id, index),
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            index=index,
            policy_version_start=lease.policy_version,
            policy_version_end=lease.policy_version,
            payload=RolloutPayload(
                completion_ids=np.array([5, 7, 1], np.int32),
                behavior_logprobs=np.array([-0.5, -1.25, -0.25], np.float32),
                finish_reason=FinishReason.STOP,
                sampling_s=0.1,
            ),
        )


@pytest.fixture(scope="session", autouse=True)
def _migrated_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let each new SQLite database begin as a copy of a migrated file: migrations take seven times as long. Tests of
    migrations call `migrate` itself.
    """
    migrated = tmp_path_factory.mktemp("migrated") / "echo.db"
    engine = connect(f"sqlite:///{migrated}")
    migrate(engine)
    engine.dispose()

    def begin(engine: Engine) -> None:
        if engine.dialect.name == "sqlite" and engine.url.database and not Path(engine.url.database).exists():
            # A link appears whole, and fails if another process has made the file. If no file can be made here, opening
            # the database fails next, and its error is the one under test.
            with contextlib.suppress(OSError), NamedTemporaryFile(dir=Path(engine.url.database).parent) as copy:
                shutil.copyfile(migrated, copy.name)
                os.link(copy.name, engine.url.database)
        check_undamaged(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "check_undamaged", begin)
        yield


@pytest.fixture
async def drive(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Driven]]]:
    """Yield a function that makes a Driven in the test's run directory.

    With `running` its driver runs; keyword arguments are coordinator settings.
    """
    async with AsyncExitStack() as stack:

        async def make(*, running: bool = True, **settings: Any) -> Driven:
            driven = Driven(RunDirectory(tmp_path), **settings)
            stack.push_async_callback(driven.async_store.close)
            if running:
                for work in (driven.driver.run(driven), driven.answer()):
                    task = asyncio.create_task(work)
                    stack.push_async_callback(asyncio.wait, [task])
                    stack.callback(task.cancel)
            return driven

        yield make


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    async with served() as judge:
        yield judge


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgreSQL]:
    """Yield a private PostgreSQL server, or skip if none is installed. A test that stops it must start it again."""
    if why := lacking():
        pytest.skip(why)
    with postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def postgresql_url(postgresql_server: PostgreSQL) -> str:
    return postgresql_server.url


@pytest.fixture
def empty_postgresql(postgresql_url: str) -> str:
    _drop_all(postgresql_url)
    return postgresql_url


def _drop_all(url: str) -> None:
    engine = connect(url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()


_SCHEMA = text(
    "SELECT md5(string_agg(concat_ws(' ', relname, attname, atttypid, attnotnull), ',' ORDER BY relname, attnum))"
    " FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid"
    " WHERE relnamespace = 'public'::regnamespace AND attnum > 0"
)
_FILLED = text(
    "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
    " AND relname NOT IN ('alembic_version', 'run_meta') AND pg_relation_size(oid) > 0"
)


@pytest.fixture(scope="session")
def _migrated_schema(postgresql_url: str) -> str:
    """Return a hash of all tables, columns and indexes after the migrations."""
    _drop_all(postgresql_url)
    Store.open(postgresql_url).close()
    engine = connect(postgresql_url)
    with engine.connect() as connection:
        schema = str(connection.execute(_SCHEMA).scalar_one())
    engine.dispose()
    return schema


@pytest.fixture
def postgresql_without_rows(postgresql_url: str, _migrated_schema: str) -> str:
    """Return the URL of the private server's database, migrated and without rows.

    Reuse the schema unless the last test changed it: migrations take five times as long as emptying the tables.
    """
    engine = connect(postgresql_url)
    with engine.begin() as connection:
        is_kept = connection.execute(_SCHEMA).scalar_one() == _migrated_schema
        if is_kept:
            if filled := connection.execute(_FILLED).scalars().all():
                connection.execute(text(f"TRUNCATE {', '.join(filled)} RESTART IDENTITY"))
            connection.execute(text("DELETE FROM run_meta"))
    engine.dispose()
    if not is_kept:
        _drop_all(postgresql_url)
    return postgresql_url
