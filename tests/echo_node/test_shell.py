"""A run's shell (the I/O around a work loop) with a real fetcher, swarm and spool, and a stub of an engine."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from echo_node.core.events import ArtefactReady, Event, FetchFailed
from echo_node.core.policies import KEPT
from echo_node.engine.supervisor import EngineFiles
from echo_node.host.address import HubAddress
from echo_node.host.spool import Spool
from echo_node.net.fetcher import Fetcher, Source
from echo_node.net.mesh import MeshLinks
from echo_node.net.receiver import Receiver
from echo_node.shell import RunParts, RunShell, artefact_title
from echo_shared.artefacts.manifest import Manifest
from echo_shared.errors import CodecError, SwarmError
from echo_shared.process.threads import in_thread
from echo_shared.signing.identity import Identity
from echo_shared.swarm import Swarm, SwarmSettings, open_swarm
from echo_shared.swarm.torrent import TorrentLayout
from echo_shared.wire.messages import ArtefactOffer, Fetched, FromNode, KeyframeWanted, PolicyPublished


class WatchedFetcher(Fetcher):
    """A fetcher that records its jobs, and checks that no two jobs on one version overlap."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.done: list[str] = []
        self.busy: set[int] = set()
        self.begun = asyncio.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.removed: asyncio.Queue[int] = asyncio.Queue()

    async def fetch(self, offer: ArtefactOffer, policy_version: int | None, **options: Any) -> Fetched:
        if policy_version is None:
            return await super().fetch(offer, policy_version, **options)
        with self._alone("fetch", policy_version):
            self.begun.set()
            await in_thread(self.may_go_on.wait)
            return await super().fetch(offer, policy_version, **options)

    async def abandon(self, policy_version: int) -> None:
        with self._alone("abandon", policy_version):
            await super().abandon(policy_version)

    async def remove(self, policy_version: int) -> None:
        await super().remove(policy_version)
        self.removed.put_nowait(policy_version)

    @contextmanager
    def _alone(self, what: str, version: int) -> Iterator[None]:
        assert version not in self.busy, f"{what} while something else is being done"
        self.done.append(what)
        self.busy.add(version)
        try:
            yield
        finally:
            self.busy.remove(version)


class IdleEngine:
    def __init__(self, files: EngineFiles) -> None:
        self.files = files

    async def run(self, after_s: float, max_width: int) -> None:
        await asyncio.Event().wait()


class Site:
    """A node's shell (its I/O), whose events the test handles one by one. The site also acts as the shell's client and
    engine maker.
    """

    def __init__(self, hub: Any, swarm: Swarm, directory: Path) -> None:
        self.hub = hub
        self.swarm = swarm
        self.inbox: asyncio.Queue[Event] = asyncio.Queue()
        self.said: list[FromNode] = []
        self.engines: list[IdleEngine] = []
        self.closed = False
        source = Source(
            address=HubAddress.parse(hub.url, insecure=False),
            hub_key=hub.me.public_key,
            run_id=hub.run_id,
            tracker_path="/announce/key",
        )
        receiver = Receiver(MeshLinks(Identity.generate()))
        places = {"artefacts": directory / "artefacts", "carriers": directory / "carriers"}
        self.fetcher = WatchedFetcher(swarm, receiver, source, **places)
        self.fetcher.set_keys(hub.run_keys)
        self.spool = Spool(directory / "spool.db")
        self.spool.open()
        self.spool.begin_run(hub.run_id)
        self.shell = RunShell(
            RunParts(
                spool=self.spool,
                fetcher=self.fetcher,
                engines=self,  # type: ignore[arg-type]
                client=self,  # type: ignore[arg-type]
                inbox=self.inbox,  # type: ignore[arg-type]
                derived=directory / "derived",
                logs=directory / "logs",
                capacity_factor=2,
            )
        )

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self.shell.close()

    async def send(self, message: FromNode) -> None:
        self.said.append(message)

    devices = ("",)

    def make(self, files: EngineFiles, device: str) -> IdleEngine:
        assert device == ""
        self.engines.append(IdleEngine(files))
        return self.engines[-1]

    async def next(self, kind: type[Event]) -> Any:
        while True:
            event = await self.inbox.get()
            await self.shell.handle(event)
            if isinstance(event, kind):
                return event

    async def settled(self) -> None:
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name().startswith("files of")))

    async def publish(self, version: int, offer: ArtefactOffer) -> None:
        await self.shell.handle(PolicyPublished(policy_version=version, offer=offer))


@pytest.fixture
async def site(hub: Any, tmp_path: Path) -> AsyncIterator[Site]:
    """Yield a Site. Its shell (the part of the node that does its I/O) has handled the hub's Welcome message and
    fetched the base model.
    """
    swarm = await open_swarm(SwarmSettings(listen_host="127.0.0.1"))
    site = Site(hub, swarm, tmp_path)
    await site.shell.open(0)
    await site.shell.handle(hub.welcome())
    await site.next(ArtefactReady)
    await site.settled()
    yield site
    site.fetcher.may_go_on.set()
    await site.close()
    await site.fetcher.close()
    await swarm.close()


def of_other_content(offer: ArtefactOffer) -> ArtefactOffer:
    manifest = Manifest.model_validate_json(offer.manifest)
    files = tuple(file.model_copy(update={"sha256": "0" * 64}) for file in manifest.files)
    return offer.model_copy(update={"manifest": manifest.model_copy(update={"files": files}).encode()})


async def test_the_base_is_fetched_and_its_engine_started(site: Site) -> None:
    (engine,) = site.engines
    assert engine.files.base_dir == site.fetcher.directory(None) and engine.files.base_dir.is_dir()
    assert engine.files.base_content == site.fetcher.base_content
    assert [said.policy_version for said in site.said if isinstance(said, Fetched)] == [None]


async def test_fetches_that_are_abandoned_in_a_chain_never_overlap_and_do_not_begin(hub: Any, site: Site) -> None:
    await hub.publish(1, announce=False)
    offer = hub.offers[1]
    site.fetcher.may_go_on.clear()
    await site.publish(1, offer)
    await site.fetcher.begun.wait()
    await site.publish(1, of_other_content(offer))
    await site.publish(1, offer)
    for _ in range(100):  # Give a job time to begin: a wrong shell would start it without waiting for the previous job.
        await asyncio.sleep(0)
    assert site.fetcher.done == ["fetch"]
    site.fetcher.may_go_on.set()
    ready = await site.next(ArtefactReady)
    assert site.fetcher.done == ["fetch", "abandon", "abandon", "fetch"]
    assert ready.policy_version == 1 and ready.fetched in site.said
    assert site.fetcher.directory(1).is_dir() and site.shell.failure is None and site.shell.fetching == {}


async def test_an_abandoned_fetchs_result_does_not_count(hub: Any, site: Site) -> None:
    await hub.publish(1, announce=False)
    offer = hub.offers[1]
    await site.publish(1, offer)
    stale = await site.inbox.get()
    assert isinstance(stale, ArtefactReady)
    site.fetcher.may_go_on.clear()
    await site.publish(1, of_other_content(offer))
    await site.publish(1, offer)
    said = len(site.said)
    await site.shell.handle(stale)
    assert site.said[said:] == []
    site.fetcher.may_go_on.set()
    ready = await site.next(ArtefactReady)
    assert ready is not stale and ready.fetched in site.said[said:]
    assert site.fetcher.directory(1).is_dir()


async def test_a_stale_answer_leaves_the_next_fetchs_answer_alone(hub: Any, site: Site) -> None:
    await hub.publish(1, announce=False)
    offer = hub.offers[1]
    await site.publish(1, offer)
    stale = await site.inbox.get()
    await site.publish(1, of_other_content(offer))
    await site.publish(1, offer)
    fresh = await site.inbox.get()
    assert isinstance(stale, ArtefactReady) and isinstance(fresh, ArtefactReady)
    said = len(site.said)
    await site.shell.handle(stale)
    assert site.said[said:] == []
    await site.shell.handle(fresh)
    assert fresh.fetched in site.said[said:] and site.fetcher.directory(1).is_dir()


@pytest.mark.parametrize("error", [CodecError("libtorrent reads other files."), SwarmError("No port is free.")])
async def test_a_carrier_that_cannot_be_served_is_deleted(
    hub: Any, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def refuse(*about: object) -> None:
        raise error

    monkeypatch.setattr(site.swarm, "seed", refuse)
    await hub.publish(1, announce=False)
    await site.publish(1, hub.offers[1])
    await site.next(ArtefactReady)
    await site.settled()
    assert list((tmp_path / "carriers").iterdir()) == []
    assert site.shell.failure is None and site.fetcher.directory(1).is_dir()


async def test_a_version_that_cannot_be_served_is_still_usable(
    hub: Any, site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await hub.publish(1, announce=False)

    honest = TorrentLayout.fits

    def refuse(layout: TorrentLayout, directory: Path) -> bool:
        if directory.is_relative_to(hub.carriers):
            return honest(layout, directory)
        raise OSError("The disk does not answer")

    monkeypatch.setattr(TorrentLayout, "fits", refuse)
    await site.publish(1, hub.offers[1])
    assert (await site.next(ArtefactReady)).policy_version == 1
    await hub.publish(2, announce=False)
    await site.publish(2, hub.offers[2])
    assert (await site.next(ArtefactReady)).policy_version == 2
    assert "Policy version 1 is not served to others" in caplog.text and site.shell.failure is None


async def test_a_fetch_that_fails_is_told_to_the_work_loop(hub: Any, site: Site) -> None:
    await hub.publish(1, announce=False)
    await site.publish(1, of_other_content(hub.offers[1]))
    failed = await site.next(FetchFailed)
    assert (failed.policy_version, failed.unreadable) == (1, False) and "not signed by the hub" in failed.what
    assert site.shell.failure is None


async def test_an_unreadable_version_is_reported_as_unreadable(hub: Any, site: Site) -> None:
    await hub.publish(1, announce=False)
    await site.publish(1, hub.offers[1])
    await site.next(ArtefactReady)
    await hub.publish(2, announce=False, parent=1)
    (site.fetcher.directory(1) / "adapter_config.json").unlink()
    await site.publish(2, hub.offers[2])
    assert (await site.next(FetchFailed)).unreadable
    assert KeyframeWanted(policy_version=2) in site.said


async def test_old_versions_are_deleted(hub: Any, site: Site) -> None:
    for version in range(1, KEPT + 2):
        await hub.publish(version, announce=False)
        await site.publish(version, hub.offers[version])
        await site.next(ArtefactReady)
    assert await site.fetcher.removed.get() == 1
    here = [version for version in range(1, KEPT + 2) if site.fetcher.directory(version).exists()]
    assert here == list(range(2, KEPT + 2))


async def test_closing_ends_running_jobs(hub: Any, site: Site) -> None:
    await hub.publish(1, announce=False)
    site.fetcher.may_go_on.clear()
    await site.publish(1, hub.offers[1])
    await site.fetcher.begun.wait()
    closing = asyncio.create_task(site.close())
    # A `close` that did not wait for the fetch's thread would end within these turns of the event loop.
    for _ in range(100):
        await asyncio.sleep(0)
    assert not closing.done()
    site.fetcher.may_go_on.set()
    await closing
    assert site.fetcher.busy == set() and site.inbox.empty() and site.shell.failure is None


def test_titles() -> None:
    assert artefact_title(None) == "The base model" and artefact_title(3) == "Policy version 3"
