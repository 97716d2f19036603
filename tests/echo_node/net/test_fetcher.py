"""The fetcher of model files, in a real BitTorrent swarm with the hub as seed."""

import asyncio
import errno
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_node.host.address import HubAddress
from echo_node.host.artefact_files import delete_artefact
from echo_node.net import carriers as carriers_module
from echo_node.net import fetcher as fetcher_module
from echo_node.net.fetcher import UNREADABLE, Fetcher, Source
from echo_node.net.mesh import MeshLinks
from echo_node.net.receiver import Receiver
from echo_shared.artefacts.manifest import Manifest, open_offer, sign_offer
from echo_shared.errors import RemoteProtocolError, StorageError, SwarmError
from echo_shared.signing.identity import Identity
from echo_shared.swarm import Swarm, SwarmSettings, make_torrent, open_swarm, read_torrent, shared_memory
from echo_shared.swarm.shared_memory import MemorySegment
from echo_shared.wire.messages import ArtefactOffer, Fetched, RunKey, Way
from tests.echo_node.conftest import write_adapter


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    swarm = await open_swarm(SwarmSettings(listen_host="127.0.0.1"))
    yield swarm
    await swarm.close()


@pytest.fixture
def fetcher(hub: Any, swarm: Swarm, tmp_path: Path) -> Fetcher:
    return make_fetcher(hub, swarm, tmp_path)


def make_fetcher(
    hub: Any,
    swarm: Swarm,
    tmp_path: Path,
    *,
    hub_key: bytes | None = None,
    receiver: Receiver | None = None,
    **options: Any,
) -> Fetcher:
    source = Source(
        address=HubAddress.parse(hub.url, insecure=False),
        hub_key=hub_key or hub.me.public_key,
        run_id=hub.run_id,
        tracker_path="/announce/key",
    )
    receiver = receiver or make_receiver()
    places = {"artefacts": tmp_path / "artefacts", "carriers": tmp_path / "carriers"}
    made = Fetcher(swarm, receiver, source, **places, **options)
    made.set_keys(hub.run_keys)
    return made


def make_receiver() -> Receiver:
    return Receiver(MeshLinks(Identity.generate()))


async def fetch_and_share(fetcher: Fetcher, offer: ArtefactOffer, version: int | None) -> Fetched:
    fetched = await fetcher.fetch(offer, version)
    await fetcher.share(offer, fetched)
    return fetched


@asynccontextmanager
async def restarted(hub: Any, tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Fetcher, Swarm]]:
    """Yield the fetcher and the swarm of the restarted node, on the same disk."""
    swarm = await open_swarm(SwarmSettings(listen_host="127.0.0.1", **options))
    try:
        yield make_fetcher(hub, swarm, tmp_path), swarm
    finally:
        await swarm.close()


def carriers_in(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "carriers").glob("*"))


def same_files(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    if names != sorted(path.name for path in other.iterdir()):
        return False
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


async def test_fetches_verifies_and_counts(hub: Any, fetcher: Fetcher) -> None:
    seen: list[tuple[int, int]] = []
    fetched = await fetcher.fetch(hub.offers[None], None, on_progress=lambda done, total: seen.append((done, total)))
    assert fetched.policy_version is None
    assert fetched.swarm_bytes + fetched.web_seed_bytes > 0
    assert same_files(fetcher.directory(None), hub.published(None))
    assert seen[-1][0] == seen[-1][1] > 0


async def test_the_unpacking_of_a_complete_carrier_is_shown(
    hub: Any, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[int | None, tuple[int, int]]] = []
    unpack = fetcher_module._make_verified

    def watched(manifest: Any, *about: Any) -> None:
        shown.append(fetcher.unpacking)
        unpack(manifest, *about)
        shown.append(fetcher.unpacking)

    monkeypatch.setattr(fetcher_module, "_make_verified", watched)
    await fetcher.fetch(hub.offers[None], None)
    total = sum(path.stat().st_size for path in hub.published(None).iterdir())
    assert shown == [{None: (0, total)}, {None: (total, total)}] and fetcher.unpacking == {}


async def test_a_verified_artefact_is_served_and_not_fetched_again(hub: Any, fetcher: Fetcher, tmp_path: Path) -> None:
    await hub.publish(1, announce=False)
    first = await fetcher.fetch(hub.offers[1], 1)
    async with restarted(hub, tmp_path) as (other, swarm):
        assert await other.fetch(hub.offers[1], 1) == first  # The second fetch returns the report of the first one.
        assert await swarm.stats() == {}
        await other.share(hub.offers[1], first)
        assert list(await swarm.stats()) == [first.info_hash]


class Killed(BaseException):
    """Sudden death of the process: no error handler catches this exception."""


async def kill_at(name: str, fetcher: Fetcher, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch the base, and raise Killed just before the call of `name`."""

    def kill(*about: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(fetcher_module if name == "write_marker" else carriers_module, name, kill)
        with pytest.raises(Killed):
            await fetcher.fetch(hub.offers[None], None)


@pytest.mark.parametrize("killed_at", ["never", "write_marker", "try_to_delete"])
async def test_a_bases_carrier_is_deleted_once_the_base_is_complete(
    hub: Any, fetcher: Fetcher, swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    """Until the marker of a complete base is written, a killed node needs the carrier (encrypted package) to rebuild
    the base. Afterwards the next process must delete it.
    """
    if killed_at == "never":
        fetched = await fetcher.fetch(hub.offers[None], None)
        assert await swarm.stats() == {} and carriers_in(tmp_path) == []
    else:
        await kill_at(killed_at, fetcher, hub, monkeypatch)
        assert carriers_in(tmp_path) == [f"{hub.run_id}-base.s"]
        await fetcher.close()
        async with restarted(hub, tmp_path) as (other, _):
            other.take_up(0)
            assert carriers_in(tmp_path) == ([f"{hub.run_id}-base.s"] if killed_at == "write_marker" else [])
            fetched = await other.fetch(hub.offers[None], None)
        came_bytes = fetched.swarm_bytes + fetched.web_seed_bytes
        # Nothing is downloaded again if the carrier was kept.
        assert came_bytes == 0 if killed_at == "write_marker" else came_bytes > 0
    await fetcher.share(hub.offers[None], fetched)
    assert await swarm.stats() == {} and carriers_in(tmp_path) == []
    assert same_files(fetcher.directory(None), hub.published(None))


@pytest.mark.parametrize("damage", ["changed", "missing", "unmarked"])
async def test_touched_files_are_verified_again(hub: Any, fetcher: Fetcher, tmp_path: Path, damage: str) -> None:
    first = await fetcher.fetch(hub.offers[None], None)
    directory = fetcher.directory(None)
    if damage == "changed":
        (directory / "config.json").write_text("{}")
    elif damage == "missing":
        (directory / "model.safetensors").unlink()
    else:
        directory.with_name(directory.name + ".verified").unlink()
    async with restarted(hub, tmp_path) as (other, _):
        assert await other.fetch(hub.offers[None], None) != first
    assert same_files(directory, hub.published(None))


async def test_an_offer_that_another_key_signed_is_refused(hub: Any, swarm: Swarm, tmp_path: Path) -> None:
    fetcher = make_fetcher(hub, swarm, tmp_path, hub_key=Identity.generate().public_key)
    with pytest.raises(RemoteProtocolError, match="not signed by the hub"):
        await fetcher.fetch(hub.offers[None], None)
    assert not fetcher.directory(None).exists()


async def test_one_artefact_is_not_taken_for_another(hub: Any, fetcher: Fetcher) -> None:
    await hub.publish(1, announce=False)
    for offer, version in [(hub.offers[None], 1), (hub.offers[1], None), (hub.offers[1], 2)]:
        with pytest.raises(RemoteProtocolError, match="one artefact as another"):
            await fetcher.fetch(offer, version)


async def test_a_torrent_that_is_not_the_signed_one_is_refused(hub: Any, fetcher: Fetcher, tmp_path: Path) -> None:
    offer: ArtefactOffer = hub.offers[None]
    forged = tmp_path / "forged" / f"{hub.run_id}-base.s"
    forged.mkdir(parents=True)
    (forged / "config.json.sealed").write_text("{}")
    swapped = offer.model_copy(update={"torrent": make_torrent(forged).torrent})
    with pytest.raises(RemoteProtocolError, match="not the one in the signed manifest"):
        await fetcher.fetch(swapped, None)


@pytest.mark.parametrize("wrong", ["other files", "later parent"])
async def test_a_carrier_that_does_not_fit_its_manifest_is_refused(hub: Any, fetcher: Fetcher, wrong: str) -> None:
    await hub.publish(1, announce=False)
    manifest = open_offer(hub.offers[1], hub.me.public_key)
    changes = {"carrier": "delta", "delta_parent": 1} if wrong == "later parent" else {}
    changed = manifest.model_copy(update=changes)
    carrier = hub.carriers / "forged" / changed.carrier_name
    carrier.mkdir(parents=True)
    (carrier / ("payload.sealed" if changes else "another.sealed")).write_text("x")
    torrent = make_torrent(carrier)
    signed = sign_offer(
        changed.model_copy(update={"info_hash": torrent.info_hash.hex()}),
        hub=hub.me,
        torrent=torrent.torrent,
        web_seed_path="/artefacts/forged/",
    )
    with pytest.raises(RemoteProtocolError, match="later version" if changes else "not those of its manifest"):
        await fetcher.fetch(signed, 1)


async def test_files_with_wrong_hashes_are_deleted_with_their_carrier(
    hub: Any, fetcher: Fetcher, swarm: Swarm, tmp_path: Path
) -> None:
    """The hub has signed a manifest with the right torrent, but with wrong hashes of the unpacked files."""
    offer: ArtefactOffer = hub.offers[None]
    manifest = open_offer(offer, hub.me.public_key)
    wrong = tuple(file.model_copy(update={"sha256": "0" * 64}) for file in manifest.files)
    signed = sign_offer(
        manifest.model_copy(update={"files": wrong}),
        hub=hub.me,
        torrent=offer.torrent,
        web_seed_path=offer.web_seed_path,
    ).model_copy(update={"peers": offer.peers})
    with pytest.raises(SwarmError, match="is complete, but cannot be read") as caught:
        await fetcher.fetch(signed, None)
    assert caught.value.code == UNREADABLE and "differs from the one that the hub signed" in (caught.value.got or "")
    assert list((tmp_path / "artefacts").iterdir()) == [] and carriers_in(tmp_path) == []
    assert len(await swarm.stats()) == 0


async def test_a_version_sealed_with_an_unknown_key_waits_for_it(hub: Any, fetcher: Fetcher, tmp_path: Path) -> None:
    fetcher.set_keys(())
    with pytest.raises(SwarmError, match="a key that this node does not have") as caught:
        await fetcher.fetch(hub.offers[None], None)
    assert caught.value.code != UNREADABLE and carriers_in(tmp_path) == [f"{hub.run_id}-base.s"]
    fetcher.set_keys(hub.run_keys)
    fetched = await fetcher.fetch(hub.offers[None], None)
    assert fetched.swarm_bytes == fetched.web_seed_bytes == 0
    assert same_files(fetcher.directory(None), hub.published(None))


async def test_a_wrong_key_opens_nothing(hub: Any, fetcher: Fetcher) -> None:
    fetcher.set_keys([RunKey(key_id=1, key=bytes(32))])
    with pytest.raises(SwarmError, match="cannot be read") as caught:
        await fetcher.fetch(hub.offers[None], None)
    assert "another key" in (caught.value.got or "")


async def test_a_delta_is_completed_by_its_parent(hub: Any, fetcher: Fetcher, swarm: Swarm) -> None:
    await hub.publish(1, announce=False)
    await hub.publish(2, announce=False, parent=1)
    await fetcher.fetch(hub.offers[1], 1)
    await fetcher.fetch(hub.offers[2], 2)
    assert same_files(fetcher.directory(2), hub.published(2))
    assert len(await swarm.stats()) == 2


async def test_a_delta_waits_for_its_parents_fetch(hub: Any, fetcher: Fetcher) -> None:
    await hub.publish(1, announce=False)
    await hub.publish(2, announce=False, parent=1)
    await asyncio.gather(fetcher.fetch(hub.offers[1], 1), fetcher.fetch(hub.offers[2], 2))
    assert same_files(fetcher.directory(2), hub.published(2))


@pytest.mark.parametrize("trouble", ["missing", "changed", "another"])
async def test_a_delta_without_the_right_parent_is_unreadable_and_the_keyframe_is_not(
    hub: Any, fetcher: Fetcher, tmp_path: Path, trouble: str
) -> None:
    await hub.publish(1, announce=False)
    await hub.publish(2, announce=False, parent=1)
    if trouble == "another":
        write_adapter(tmp_path / "another" / hub.published(1).name, 9)
        await fetcher.fetch(await hub.offer(1, tmp_path / "another" / hub.published(1).name), 1)
    elif trouble == "changed":
        await fetcher.fetch(hub.offers[1], 1)
        (fetcher.directory(1) / "adapter_config.json").write_text("{}")
    with pytest.raises(SwarmError, match="is complete, but cannot be read") as caught:
        await fetcher.fetch(hub.offers[2], 2)
    assert caught.value.code == UNREADABLE
    assert f"{hub.run_id}-v000002.d1" not in carriers_in(tmp_path) and not fetcher.directory(2).exists()
    await fetcher.fetch(await hub.offer(2, hub.published(2)), 2)
    assert same_files(fetcher.directory(2), hub.published(2))


async def test_pushed_versions_are_accepted_and_served(hub: Any, swarm: Swarm, tmp_path: Path) -> None:
    receiver = make_receiver()
    fetcher = make_fetcher(hub, swarm, tmp_path, receiver=receiver)
    await hub.publish(1, announce=False, way=Way.INLINE)
    seen: list[tuple[int, int]] = []
    for piece in hub.pieces(hub.offers[1]):
        receiver.take(piece, None)
    fetched = await fetcher.fetch(hub.offers[1], 1, on_progress=lambda done, total: seen.append((done, total)))
    total = read_torrent(hub.offers[1].torrent).total_bytes
    assert (fetched.pushed_bytes, fetched.swarm_bytes, fetched.web_seed_bytes) == (total, 0, 0)
    assert same_files(fetcher.directory(1), hub.published(1))
    assert seen[0] == (0, total)
    await fetcher.share(hub.offers[1], fetched)
    assert [torrent.complete for torrent in (await swarm.stats()).values()] == [True]


async def test_a_push_whose_file_cannot_be_opened_is_fetched_again(
    hub: Any, swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open

    def no_descriptors(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode == "rb":
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, mode, **options)

    receiver = make_receiver()
    fetcher = make_fetcher(hub, swarm, tmp_path, receiver=receiver)
    await hub.publish(1, announce=False, way=Way.INLINE)
    for piece in hub.pieces(hub.offers[1]):
        receiver.take(piece, None)
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="cannot be written or read"):
        patch.setattr(Path, "open", no_descriptors)
        await fetcher.fetch(hub.offers[1], 1)
    await fetcher.fetch(hub.offers[1], 1)
    assert same_files(fetcher.directory(1), hub.published(1))


async def test_a_push_that_falls_silent_continues_through_the_swarm(
    hub: Any, swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "SILENCE_S", 0.0)
    receiver = make_receiver()
    fetcher = make_fetcher(hub, swarm, tmp_path, receiver=receiver)
    first, *others = hub.pieces(hub.offers[None])
    receiver.take(first, None)
    fetched = await fetcher.fetch(hub.offers[None].model_copy(update={"way": Way.BROADCAST}), None)
    brought = fetched.swarm_bytes + fetched.web_seed_bytes
    assert 0 < brought <= sum(len(piece.data) for piece in others)
    assert fetched.pushed_bytes == len(first.data)
    assert same_files(fetcher.directory(None), hub.published(None))


@pytest.mark.parametrize("way", [Way.SWARM, Way.WEB_SEED])
async def test_a_version_comes_by_the_web_seed_if_configured_or_without_peers(
    hub: Any, tmp_path: Path, way: Way
) -> None:
    changes = {"peers": ()} if way is Way.SWARM else {"way": way}
    async with restarted(hub, tmp_path, web_seed_after_s=0 if way is Way.SWARM else 3.0) as (fetcher, _):
        fetched = await fetcher.fetch(hub.offers[None].model_copy(update=changes), None)
    assert fetched.web_seed_bytes > 0 and fetched.swarm_bytes == 0
    assert way is Way.SWARM or hub.trackers_asked == []


needs_memory = pytest.mark.skipif(not shared_memory.AVAILABLE, reason="this system or Python has no such memory")


@pytest.fixture
async def in_memory(hub: Any) -> AsyncIterator[tuple[ArtefactOffer, MemorySegment]]:
    """Yield the offer of version 1, which the hub also holds in shared memory."""
    await hub.publish(1, announce=False)
    manifest = open_offer(hub.offers[1], hub.me.public_key)
    segment = MemorySegment.of(manifest, hub.directory / manifest.name)
    yield hub.offers[1].model_copy(update={"shared_memory": segment.address}), segment
    if memory_of(segment).is_symlink():
        segment.close()


def memory_of(segment: MemorySegment) -> Path:
    return Path(f"/proc/self/fd/{segment.address.descriptor}")


@needs_memory
async def test_a_version_in_the_hubs_memory_is_read_and_verified(
    hub: Any, fetcher: Fetcher, swarm: Swarm, tmp_path: Path, in_memory: tuple[ArtefactOffer, MemorySegment]
) -> None:
    offer, _ = in_memory
    manifest = open_offer(offer, hub.me.public_key)
    # Simulate an interrupted fetch over the network: its carrier directory exists.
    beginning = tmp_path / "carriers" / manifest.carrier_name
    beginning.mkdir(parents=True)
    fetched = await fetcher.fetch(offer.model_copy(update={"peers": ()}), 1)
    assert (fetched.policy_version, fetched.info_hash.hex()) == (1, manifest.info_hash)
    assert fetched.shared_memory_bytes == manifest.total_bytes
    assert fetched.swarm_bytes == fetched.web_seed_bytes == 0
    assert same_files(fetcher.directory(1), hub.published(1))
    assert await fetch_and_share(fetcher, offer, 1) == fetched
    assert await swarm.stats() == {} and not beginning.exists()


@needs_memory
@pytest.mark.parametrize("change", ["closed", "other bytes", "short", "elsewhere"])
async def test_the_swarm_is_used_if_memory_lacks_the_version(
    hub: Any,
    fetcher: Fetcher,
    in_memory: tuple[ArtefactOffer, MemorySegment],
    change: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    offer, segment = in_memory
    match change:
        case "closed":
            segment.close()
        case "other bytes":
            with memory_of(segment).open("r+b") as memory:
                memory.seek(-1, os.SEEK_END)
                memory.write(b"!")
        case "short":
            os.truncate(memory_of(segment), 1_000)
        case "elsewhere":
            address = segment.address.model_copy(update={"pid": 2**31 - 1})
            offer = offer.model_copy(update={"shared_memory": address})
    with caplog.at_level(logging.DEBUG, "echo_node"):
        fetched = await fetcher.fetch(offer, 1)
    assert fetched.swarm_bytes > 0 and fetched.shared_memory_bytes == 0
    assert same_files(fetcher.directory(1), hub.published(1))
    (told,) = [record for record in caplog.records if "memory" in record.message]
    assert told.levelno == logging.DEBUG


@needs_memory
async def test_a_reader_that_is_cancelled_has_ended_before_its_files_are_deleted(
    fetcher: Fetcher, in_memory: tuple[ArtefactOffer, MemorySegment], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, begun = shared_memory.read, asyncio.Event()
    may_go_on, has_ended = threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(address: Any, manifest: Manifest, directory: Path) -> None:
        loop.call_soon_threadsafe(begun.set)
        may_go_on.wait()
        honest(address, manifest, directory)
        has_ended.set()

    monkeypatch.setattr(shared_memory, "read", slow)
    fetch = asyncio.create_task(fetcher.fetch(in_memory[0], 1))
    await begun.wait()
    fetch.cancel()
    for _ in range(100):  # A fetch that did not wait for its thread would end within 100 turns of the event loop.
        await asyncio.sleep(0)
    assert not fetch.done()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    assert has_ended.is_set()
    await fetcher.remove(1)
    assert not fetcher.directory(1).exists()


async def test_a_removed_version_is_served_until_it_is_unwanted(
    hub: Any, fetcher: Fetcher, swarm: Swarm, tmp_path: Path
) -> None:
    await hub.publish(1, announce=False)
    fetched = await fetch_and_share(fetcher, hub.offers[1], 1)
    await fetcher.remove(1)
    assert not fetcher.directory(1).exists() and list(await swarm.stats()) == [fetched.info_hash]
    await fetcher.unwanted([fetched.info_hash, bytes(20)])
    assert await swarm.stats() == {} and carriers_in(tmp_path) == []


@pytest.mark.parametrize("said", ["before", "after"])
async def test_a_version_unwanted_by_others_is_still_used_here(
    hub: Any, fetcher: Fetcher, swarm: Swarm, tmp_path: Path, said: str
) -> None:
    await hub.publish(1, announce=False)
    fetched = await fetcher.fetch(hub.offers[1], 1)
    if said == "after":
        await fetcher.share(hub.offers[1], fetched)
    await fetcher.unwanted([fetched.info_hash])
    if said == "before":
        await fetcher.share(hub.offers[1], fetched)
    assert await swarm.stats() == {} and carriers_in(tmp_path) == []
    assert same_files(fetcher.directory(1), hub.published(1))
    assert await fetcher.fetch(hub.offers[1], 1) == fetched


async def test_a_version_wanted_again_is_served_again(hub: Any, fetcher: Fetcher, swarm: Swarm, tmp_path: Path) -> None:
    await hub.publish(1, announce=False)
    info_hash = read_torrent(hub.offers[1].torrent).info_hash
    await fetcher.unwanted([info_hash])
    await fetch_and_share(fetcher, hub.offers[1], 1)
    assert list(await swarm.stats()) == [info_hash]


async def test_a_carrier_that_comes_again_is_not_deleted_meanwhile(hub: Any, fetcher: Fetcher, tmp_path: Path) -> None:
    await hub.publish(1, announce=False)
    fetched = await fetch_and_share(fetcher, hub.offers[1], 1)
    await fetcher.remove(1)
    fetcher.set_keys(())
    with pytest.raises(SwarmError, match="does not have"):
        await fetcher.fetch(hub.offers[1], 1)
    await fetcher.unwanted([fetched.info_hash])
    assert carriers_in(tmp_path) == [open_offer(hub.offers[1], hub.me.public_key).carrier_name]


@needs_memory
async def test_the_beginning_of_a_carrier_that_cannot_be_deleted_is_not_served(
    hub: Any,
    fetcher: Fetcher,
    swarm: Swarm,
    tmp_path: Path,
    in_memory: tuple[ArtefactOffer, MemorySegment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer, _ = in_memory
    beginning = tmp_path / "carriers" / open_offer(offer, hub.me.public_key).carrier_name
    beginning.mkdir(parents=True)
    for path, size_bytes in read_torrent(offer.torrent).files:
        (beginning / path).write_bytes(bytes(size_bytes))
    monkeypatch.setattr("echo_node.net.carriers.try_to_delete", lambda directory: None)
    fetched = await fetch_and_share(fetcher, offer, 1)
    assert fetched.shared_memory_bytes and await swarm.stats() == {}


async def test_an_abandoned_version_leaves_nothing(hub: Any, fetcher: Fetcher, swarm: Swarm, tmp_path: Path) -> None:
    await hub.publish(1, announce=False)
    await fetch_and_share(fetcher, hub.offers[1], 1)
    for _ in range(2):
        await fetcher.abandon(1)
        assert not fetcher.directory(1).exists() and carriers_in(tmp_path) == [] and await swarm.stats() == {}


async def test_a_fetch_that_does_not_fit_the_disk_does_not_start(
    hub: Any, fetcher: Fetcher, swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = open_offer(hub.offers[None], hub.me.public_key).total_bytes
    both = total + read_torrent(hub.offers[None].torrent).total_bytes
    disk = {"total": 10 * total, "free": both}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(**disk))
    with pytest.raises(StorageError, match=r"does not fit(.|\n)*MiB free(.|\n)*Free some space"):
        await fetcher.fetch(hub.offers[None], None)
    assert await swarm.stats() == {} and not fetcher.directory(None).exists() and carriers_in(tmp_path) == []
    # Enough free space for the files, plus the twentieth of the disk that must stay free.
    disk["free"] = both + total // 2 + 1
    await fetcher.fetch(hub.offers[None], None)
    assert same_files(fetcher.directory(None), hub.published(None))


async def test_a_base_needs_space_for_the_engines_conversion(
    hub: Any, swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = open_offer(hub.offers[None], hub.me.public_key).total_bytes
    disk = {"total": 0, "free": 4 * total - 1}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(**disk))
    monkeypatch.setattr(fetcher_module, "conversion_bytes", lambda base_bytes, **engine: 3 * base_bytes)
    fetcher = make_fetcher(hub, swarm, tmp_path)
    with pytest.raises(StorageError, match="does not fit"):
        await fetcher.fetch(hub.offers[None], None)
    disk["free"] += 1
    await fetcher.fetch(hub.offers[None], None)
    await hub.publish(1, announce=False)
    disk["free"] = total
    # Policy versions are not converted, so they need no space for conversion.
    await fetcher.fetch(hub.offers[1], 1)


async def test_existing_parts_of_a_carrier_need_no_space(
    hub: Any, fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kill_at("write_marker", fetcher, hub, monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10, free=0))
    async with restarted(hub, tmp_path) as (other, _):
        await other.fetch(hub.offers[None], None)
    assert same_files(fetcher.directory(None), hub.published(None))


@pytest.mark.parametrize("call", ["stat", "replace", "write_text"])
async def test_a_disk_that_refuses_is_a_storage_error(
    hub: Any, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    honest = getattr(Path, call)

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name.endswith((".tmp", ".safetensors")) and fetcher.directory(None).parent in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return honest(path, *args, **kwargs)

    monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(StorageError) as caught:
        await fetcher.fetch(hub.offers[None], None)
    assert "No space left" in (caught.value.got or "")
    monkeypatch.undo()
    await fetcher.fetch(hub.offers[None], None)
    assert same_files(fetcher.directory(None), hub.published(None))


async def test_undeletable_files_are_deleted_at_the_next_start(
    hub: Any, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await hub.publish(1, announce=False)
    await fetcher.fetch(hub.offers[1], 1)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "The file is in use")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    await fetcher.remove(1)
    assert fetcher.take_up(2) == {}
    assert caplog.text.count("v000001 could not be deleted") == 2
    with pytest.raises(StorageError, match="in use"):
        delete_artefact(fetcher.directory(1))
    monkeypatch.undo()
    fetcher.take_up(2)
    assert not fetcher.directory(1).exists()


async def test_after_a_restart_a_version_is_read_again(hub: Any, fetcher: Fetcher) -> None:
    """After a restart all bytes are hashed again, because a power cut may change them without changing size or time."""
    for version in (1, 2):
        await hub.publish(version, announce=False)
        await fetcher.fetch(hub.offers[version], version)
    weights = fetcher.directory(2) / "adapter_model.safetensors"
    before, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert list(fetcher.take_up(2)) == [1] and not fetcher.directory(2).exists()


async def test_a_base_is_named_by_its_content(hub: Any, fetcher: Fetcher, tmp_path: Path, swarm: Swarm) -> None:
    """A base sealed with another key keeps its name: a new name would mean another download."""
    first = await fetcher.fetch(hub.offers[None], None)
    content = fetcher.base_content
    hub.run_keys = (*hub.run_keys, RunKey(key_id=2, key=bytes(32)))
    resealed = await hub.offer(None, hub.published(None))
    assert resealed.manifest != hub.offers[None].manifest
    assert await fetcher.fetch(resealed, None) == first  # The node lacks the new key, so a new download would fail.
    assert fetcher.base_content == content and len(content) == 32
    directory = tmp_path / "other" / f"{hub.run_id}-base"
    shutil.copytree(hub.published(None), directory)
    (directory / "model.safetensors").write_bytes(b"other weights")
    fetcher.set_keys(hub.run_keys)
    other = await fetcher.fetch(await hub.offer(None, directory), None)
    assert fetcher.base_content != content and other.info_hash != first.info_hash
    assert same_files(fetcher.directory(None), directory)


def gguf_form(directory: Path, content: bytes) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_bytes(b"{}")
    (directory / "m.gguf").write_bytes(content)
    return directory


async def test_a_base_is_here_in_the_form_that_was_fetched_last(hub: Any, fetcher: Fetcher, tmp_path: Path) -> None:
    """Weights and GGUF file share one directory, so each fetch replaces the other form."""
    forms = {"files": hub.published(None), "gguf": gguf_form(tmp_path / "gguf", b"quantised")}
    offers = {"files": hub.offers[None], "gguf": await hub.offer(None, forms["gguf"], gguf=True)}
    for form in ("gguf", "files", "gguf"):
        offer, directory = offers[form], forms[form]
        fetched = await fetcher.fetch(offer, None)
        assert same_files(fetcher.directory(None), directory)
        assert await fetcher.fetch(offer, None) == fetched, "it is not fetched again"
        assert carriers_in(tmp_path) == []


async def test_a_fetch_of_one_form_deletes_what_has_arrived_of_the_other(
    hub: Any, fetcher: Fetcher, tmp_path: Path
) -> None:
    left = tmp_path / "carriers" / f"{fetcher.directory(None).name}.g"
    left.mkdir(parents=True)
    (left / "m.gguf.sealed").write_bytes(bytes(1_000))
    await fetcher.fetch(hub.offers[None], None)
    assert carriers_in(tmp_path) == []


async def test_a_gguf_file_is_withdrawn_if_the_hub_offers_another_or_none(
    hub: Any, fetcher: Fetcher, tmp_path: Path
) -> None:
    gguf, other = [
        await hub.offer(None, gguf_form(tmp_path / name, name.encode()), gguf=True) for name in ("gguf", "other")
    ]
    assert not fetcher.is_withdrawn(None), "nothing was fetched"
    await fetcher.fetch(hub.offers[None], None)
    assert not fetcher.is_withdrawn(None) and not fetcher.is_withdrawn(gguf), "the node has weights"
    await fetcher.fetch(gguf, None)
    assert fetcher.is_withdrawn(None) and fetcher.is_withdrawn(other) and not fetcher.is_withdrawn(gguf)


async def test_the_next_process_resumes_verified_versions_and_the_newest_fetch(
    hub: Any, fetcher: Fetcher, tmp_path: Path
) -> None:
    reports = {}
    for version in range(1, 7):
        await hub.publish(version, announce=False)
        reports[version] = await fetcher.fetch(hub.offers[version], version)
    (fetcher.directory(4) / "adapter_config.json").write_text("{}")
    for name in (f"{hub.run_id}-v000005.d4", f"{hub.run_id}-v000004.d2", f"{hub.run_id}1-v000001.k", "other-v000001.k"):
        (tmp_path / "carriers" / name).mkdir()
    async with restarted(hub, tmp_path) as (other, _):
        found = other.take_up(5)
        assert {version: one.fetched for version, one in found.items()} == {v: reports[v] for v in (1, 2, 3, 5)}
        assert {one.content for one in found.values()} == {
            open_offer(hub.offers[version], hub.me.public_key).content for version in found
        }
        here = [version for version in range(1, 7) if other.directory(version).exists()]
        assert here == [1, 2, 3, 5]
        run = hub.run_id
        assert carriers_in(tmp_path) == sorted(
            [f"{run}-v000005.d4", f"{run}-v000005.k", f"{run}1-v000001.k", "other-v000001.k"]
        )


async def test_a_cancelled_fetch_can_be_resumed(hub: Any, swarm: Swarm, tmp_path: Path) -> None:
    receiver = make_receiver()
    fetcher = make_fetcher(hub, swarm, tmp_path, receiver=receiver)
    offer = hub.offers[None].model_copy(update={"way": Way.BROADCAST})
    begun = asyncio.Event()
    first, *_ = hub.pieces(offer)
    fetch = asyncio.create_task(fetcher.fetch(offer, None, on_progress=lambda done, total: begun.set()))
    receiver.take(first, None)
    await begun.wait()
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    async with restarted(hub, tmp_path) as (other, _):
        fetched = await other.fetch(hub.offers[None], None)
    assert same_files(fetcher.directory(None), hub.published(None))
    assert fetched.swarm_bytes + fetched.web_seed_bytes > 0


async def test_a_manifest_with_an_impossible_size_is_refused(hub: Any, fetcher: Fetcher) -> None:
    offer: ArtefactOffer = hub.offers[None]
    manifest = open_offer(offer, hub.me.public_key)
    huge = tuple(file.model_copy(update={"size_bytes": 10**400}) for file in manifest.files)
    signed = sign_offer(
        manifest.model_copy(update={"files": huge}), hub=hub.me, torrent=offer.torrent, web_seed_path="/artefacts/x/"
    )
    with pytest.raises(RemoteProtocolError, match="A manifest is not valid"):
        await fetcher.fetch(signed, None)
