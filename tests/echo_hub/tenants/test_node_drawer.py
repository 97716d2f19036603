"""The drawer with the real coordinator, driver and database; the nodes are events of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import Action, DeliverAnswer, RevokeLease, SendLease
from echo_hub.core.accounting.events import LeaseGivenBack, NodeDisconnected
from echo_hub.core.answer_groups import StreamedTokens, is_answer
from echo_hub.run.directory import RunDirectory
from echo_hub.scoring.asked import AskedGroup, AskedGroups, GroupBounds
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.store.answers import read_open_answers
from echo_hub.store.reports import read_accounting
from echo_hub.tenants import node_drawer
from echo_hub.tenants.drawing import DrawJob, DrawnPiece
from echo_hub.tenants.node_drawer import NodeDrawer
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import Sample
from echo_shared.errors import CodecError
from echo_shared.records.run import LiveNode
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION
from tests.echo_hub.conftest import Driven

BOUNDS = SamplingBounds(vocabulary_size=100, max_tokens=8, stop_ids=frozenset({1}))


class Published:
    """Stand-in for the publishing of versions to nodes, which records its calls."""

    def __init__(self) -> None:
        self.held: list[set[int]] = []
        self.versions: dict[int, Path] = {}
        self.held_at_publication: set[int] = set()

    async def publish_for_tenant(self, policy_version: int, directory: Path) -> None:
        if directory.name == "broken":
            raise CodecError("No engine can draw with this adapter.", got="NaN", do="Train less.")
        self.versions[policy_version] = directory
        self.held_at_publication = self.held[-1] if self.held else set()

    async def withdraw_for_tenant(self, policy_version: int) -> None:
        del self.versions[policy_version]

    def hold_for_tenants(self, versions: Iterable[int]) -> None:
        self.held.append(set(versions))


class Parts:
    def __init__(self) -> None:
        self.parts: list[StreamedTokens] = []

    def answers_under_way(self) -> Iterator[StreamedTokens]:
        yield from self.parts


BAD = FIRST_TENANT_VERSION + 1
"""Version of a tenant's adapter that no engine can use."""


class Bench:
    """A hub without training, run by a driver, and the part of it that has nodes draw tenants' samples."""

    def __init__(self, driven: Driven, directory: RunDirectory) -> None:
        self.driven = driven
        self.asked, self.published, self.parts = AskedGroups(), Published(), Parts()
        groups, answered = driven.store.read(read_open_answers)
        for group in groups:
            self.asked.add(
                group.group_id, AskedGroup(prompt_ids=group.prompt_ids, seed=group.seed, sampling=group.sampling)
            )
        self.live: dict[str, LiveNode] = {}
        self.drawer = NodeDrawer(
            queue=driven.queue,
            store=driven.async_store,
            asked=self.asked,
            bounds=GroupBounds(BOUNDS, self.asked),
            coordinator=driven.driver.coordinator,
            live=self.live,
            publishing=self.published,
            directory=directory,
            streamed=self.parts,
            restored=groups,
            answered=answered,
        )
        driven.look = self._look

    def _look(self, action: Action) -> None:
        if isinstance(action, DeliverAnswer):
            self.drawer.take(action)

    @property
    def leases(self) -> list[SendLease]:
        return [lease for lease in self.driven.of(SendLease) if is_answer(lease.group_id)]

    async def leased(self, number: int) -> list[SendLease]:
        await self.driven.until(lambda: len(self.leases) >= number)
        return self.leases

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for work in (self.driven.driver.run(self.driven), self.driven.answer(), self.drawer.run()):
                tasks.create_task(work)


@asynccontextmanager
async def served(directory: RunDirectory) -> AsyncIterator[Bench]:
    """Serve from the directory's database until the block ends, as after a start of the hub."""
    driven = Driven(directory, leasing="draining")
    bench = Bench(driven, directory)
    task = asyncio.create_task(bench.serve())
    try:
        yield bench
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await driven.async_store.close()


def job(request_id: str, count: int = 1, **changes: Any) -> DrawJob:
    values: dict[str, Any] = {
        "request_id": request_id,
        "tenant_id": "ada",
        "prompt_ids": np.array([3, 4], np.int32),
        "sequence_ids": tuple(f"{request_id}-{index}" for index in range(count)),
        "policy_version": 0,
        "temperature": 1.0,
        "max_tokens": 4,
        "stop_ids": (1,),
        "stop_strings": (),
        "seed": 7,
        "checked": False,
    }
    return DrawJob(**{**values, **changes})


async def all_of(items: AsyncIterator[DrawnPiece | Sample]) -> list[Sample]:
    return [item async for item in items if isinstance(item, Sample)]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


async def test_a_job_gets_each_of_its_samples_once(directory: RunDirectory) -> None:
    async with served(directory) as bench:
        drawn = asyncio.create_task(all_of(bench.drawer.draw(job("r", 2))))
        await bench.driven.node("a")
        (lease,) = await bench.leased(1)
        assert lease.sampling is not None and (lease.sampling.max_tokens, lease.indices) == (4, (0, 1))
        await bench.driven.deliver(lease)
        samples = await drawn
        assert {sample.sequence_id: sample.index for sample in samples} == {"r-0": 0, "r-1": 1}
        assert {sample.drawn_by for sample in samples} == {"a"} and samples[0].finish == "stop"
        expected = bench.driven.arrival(lease, 0).payload
        assert samples[0].token_ids.tolist() == expected.completion_ids.tolist()
        assert samples[0].logprobs.tolist() == expected.behavior_logprobs.tolist()
        assert bench.driven.store.read(read_accounting).answered == 2


async def test_an_old_version_of_the_run_is_published_for_its_jobs(directory: RunDirectory) -> None:
    """Nodes can fetch only the newest versions of the run, so a lease of an older version would never be sent."""
    async with served(directory) as bench:
        drawn = asyncio.create_task(all_of(bench.drawer.draw(job("r", policy_version=3))))
        await bench.driven.node("a")
        (lease,) = await bench.leased(1)
        assert lease.policy_version == 3 and bench.published.versions == {3: directory.adapter(3)}
        assert bench.published.held[-1] == {3} and bench.published.held_at_publication == {3}
        await bench.driven.deliver(lease)
        await drawn
        assert bench.published.held[-1] == set()


async def test_a_job_whose_adapter_no_node_can_use_is_refused(directory: RunDirectory) -> None:
    async with served(directory) as bench:
        drawn = asyncio.create_task(all_of(bench.drawer.draw(job("r", policy_version=BAD))))
        for number, name in enumerate("ab", 1):
            await bench.driven.node(name)
            lease = (await bench.leased(number))[-1]
            assert lease.node_id == name
            await bench.driven.queue.put(
                LeaseGivenBack(
                    node_id=name, lease_id=lease.lease_id, indices=(0,), reason="not finite", unusable_version=BAD
                )
            )
        with pytest.raises(Refusal, match="not finite"):
            await drawn
        again = asyncio.create_task(all_of(bench.drawer.draw(job("again"))))
        await bench.driven.deliver((await bench.leased(3))[-1])
        assert len(await again) == 1, "the nodes go on with other work"


async def test_equal_jobs_that_come_together_share_one_lease(directory: RunDirectory) -> None:
    async with served(directory) as bench:
        drawn = [
            asyncio.create_task(all_of(bench.drawer.draw(job(f"r{at}", first_index=at, joins=True)))) for at in range(4)
        ]
        drawn += [asyncio.create_task(all_of(bench.drawer.draw(job("other", max_tokens=5))))]
        drawn += [asyncio.create_task(all_of(bench.drawer.draw(job("again", first_index=2))))]
        await bench.driven.node("a")
        leases = await bench.leased(3)
        assert sorted(lease.indices for lease in leases) == [(0,), (0, 1, 2, 3), (2,)]
        for lease in leases:
            await bench.driven.deliver(lease)
        names = [[sample.sequence_id for sample in samples] for samples in await asyncio.gather(*drawn)]
        assert names == [["r0-0"], ["r1-0"], ["r2-0"], ["r3-0"], ["other-0"], ["again-0"]]


async def test_a_failure_of_a_node_is_invisible(directory: RunDirectory) -> None:
    async with served(directory) as bench:
        drawn = asyncio.create_task(all_of(bench.drawer.draw(job("r"))))
        await bench.driven.node("a")
        (first,) = await bench.leased(1)
        await bench.driven.node("b")
        back = LeaseGivenBack(node_id="a", lease_id=first.lease_id, indices=(0,), reason="it stops")
        await bench.driven.queue.put(back)
        await bench.driven.queue.put(NodeDisconnected(node_id="a"))
        (_, second) = await bench.leased(2)
        assert (second.node_id, second.seed) == ("b", first.seed)
        await bench.driven.deliver(second)
        (sample,) = await drawn
        assert sample.drawn_by == "b"


async def test_closing_a_job_revokes_its_lease(directory: RunDirectory) -> None:
    async with served(directory) as bench:
        drawn = asyncio.create_task(all_of(bench.drawer.draw(job("r"))))
        await bench.driven.node("a")
        (lease,) = await bench.leased(1)
        drawn.cancel()
        await bench.driven.until(lambda: len(bench.driven.of(RevokeLease)) == 1)
        assert bench.driven.of(RevokeLease)[0].lease_id == lease.lease_id
        assert bench.driven.driver.coordinator.status().requests_open == 0


async def test_a_restart_loses_nothing_and_draws_nothing_twice(directory: RunDirectory) -> None:
    async with served(directory) as bench:
        drawn = asyncio.create_task(all_of(bench.drawer.draw(job("r", 2))))
        await bench.driven.node("a")
        (lease,) = await bench.leased(1)
        await bench.driven.queue.put(bench.driven.arrival(lease, 0))
        await bench.driven.until(lambda: len(bench.driven.of(DeliverAnswer)) == 1)
        bench.driven.driver._queue.end()  # From here on, the dying hub handles no event.
        drawn.cancel()
    async with served(directory) as bench:
        drawn = asyncio.create_task(all_of(bench.drawer.draw(job("r", 2))))
        await bench.driven.node("a")
        (again,) = await bench.leased(1)
        assert (again.lease_id, again.indices, again.seed) == (lease.lease_id, (1,), lease.seed)
        await bench.driven.deliver(again)
        assert sorted(sample.sequence_id for sample in await drawn) == ["r-0", "r-1"]
        books = bench.driven.store.read(read_accounting)
        assert (books.leased, books.answered) == (2, 2)
        assert sorted(sample.sequence_id for sample in await all_of(bench.drawer.draw(job("r", 2)))) == ["r-0", "r-1"]


async def test_delivered_groups_leave_the_store(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_drawer, "SETTLE_S", 0.0)
    monkeypatch.setattr(node_drawer, "LOOKED_S", 0.01)
    async with served(directory) as bench:
        drawn = asyncio.create_task(all_of(bench.drawer.draw(job("r", policy_version=5))))
        await bench.driven.node("a")
        await bench.driven.deliver((await bench.leased(1))[0])
        await drawn
        for _ in range(1_000):
            # The group leaves the memory just after the database.
            if not bench.driven.store.read(read_open_answers)[0] and not bench.asked.of(bench.leases[0].group_id):
                break
            await asyncio.sleep(0.02)
        assert bench.asked.of(bench.leases[0].group_id) is None
        assert bench.published.held == [{5}, set()], "its version was kept while the request was open"


async def test_new_tokens_of_proven_nodes_are_streamed(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_drawer, "LOOKED_S", 0.01)
    async with served(directory) as bench:
        await bench.driven.node("a")
        proof = asyncio.create_task(all_of(bench.drawer.draw(job("proof"))))
        await bench.driven.deliver((await bench.leased(1))[0])
        await proof
        items = bench.drawer.draw(job("r", first_index=3, seed=8))
        first = asyncio.ensure_future(anext(items))
        lease = (await bench.leased(2))[1]

        def streamed(node_id: str, *ids: int) -> StreamedTokens:
            logprobs = np.full(len(ids), -1.0, np.float32)
            return StreamedTokens(node_id, lease.group_id, 3, np.array(ids, np.int32), logprobs)

        bench.parts.parts = [streamed("stranger", 9, 9), streamed("a", 5, 6)]
        piece = await first
        assert isinstance(piece, DrawnPiece) and (piece.index, piece.start, piece.token_ids.tolist()) == (0, 0, [5, 6])
        bench.parts.parts = [streamed("a", 5, 6, 7), streamed("a", 5, 8, 8, 8)]
        piece = await anext(items)
        assert isinstance(piece, DrawnPiece) and (piece.start, piece.token_ids.tolist()) == (2, [7])
        bench.parts.parts = []
        await bench.driven.deliver(lease)
        assert isinstance(await anext(items), Sample)
        with pytest.raises(StopAsyncIteration):
            await anext(items)


async def test_what_cannot_be_drawn_is_refused(directory: RunDirectory) -> None:
    async with served(directory) as bench:
        with pytest.raises(Refusal, match="too many samples") as too_many:
            await all_of(bench.drawer.draw(job("r", 2, first_index=1_023)))
        assert too_many.value.kind is RefusalKind.INVALID
        bench.drawer._is_checking = False
        with pytest.raises(Refusal, match="checks no samples"):
            await all_of(bench.drawer.draw(job("r", checked=True)))
        with pytest.raises(Refusal, match="No engine can draw"):
            await bench.drawer.publish(2**30, Path("broken"))
        await bench.drawer.publish(2**30, Path("v1"))
        assert bench.published.versions == {2**30: Path("v1")}
        await bench.drawer.withdraw(2**30)
        assert bench.published.versions == {}


async def test_the_state_says_who_is_there(directory: RunDirectory) -> None:
    async with served(directory) as bench:
        assert bench.drawer.state() == "No node is connected."
        bench.live["a"] = replace(LiveNode(cost_per_hour=0.0), capacity=0)
        assert bench.drawer.state() == "0 of 1 connected nodes take work."
        bench.live["b"] = replace(LiveNode(cost_per_hour=0.0), capacity=4)
        assert bench.drawer.state() == ""
