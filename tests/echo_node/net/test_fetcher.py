"""The fetcher with a real swarm, from a hub that seeds for real."""

import asyncio
import errno
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_node.net.address import HubAddress
from echo_node.net.fetcher import Fetcher, Source, delete_artefact
from echo_shared import shared_memory
from echo_shared.artefacts import Manifest, artefact_name, open_offer, sign_offer
from echo_shared.errors import RemoteProtocolError, StorageError, SwarmError
from echo_shared.identity import Identity
from echo_shared.messages import ArtefactOffer
from echo_shared.shared_memory import Segment
from echo_shared.swarm import Swarm, SwarmSettings, make_torrent


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    swarm = await Swarm.open(SwarmSettings(listen_host="127.0.0.1"))
    yield swarm
    await swarm.close()


@pytest.fixture
def fetcher(hub: Any, swarm: Swarm, tmp_path: Path) -> Fetcher:
    return make_fetcher(hub, swarm, tmp_path)


def make_fetcher(hub: Any, swarm: Swarm, tmp_path: Path, hub_key: bytes | None = None) -> Fetcher:
    source = Source(
        address=HubAddress.parse(hub.url, insecure=False),
        hub_key=hub_key or hub.me.public_key,
        run_id=hub.run_id,
        tracker_path="/announce/key",
    )
    return Fetcher(swarm, tmp_path / "artefacts", source)


def same_files(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    if names != sorted(path.name for path in other.iterdir()):
        return False
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


async def test_fetches_verifies_and_counts(hub: Any, fetcher: Fetcher) -> None:
    seen: list[tuple[int, int]] = []
    fetched = await fetcher.fetch(hub.offers[None], None, on_progress=lambda done, total: seen.append((done, total)))
    assert fetched is not None and fetched.policy_version is None
    assert fetched.swarm_bytes + fetched.web_seed_bytes > 0
    assert same_files(fetcher.directory(None), hub.directory / artefact_name("base", hub.run_id, 0))
    assert seen[-1][0] == seen[-1][1] > 0


async def test_what_is_verified_is_not_fetched_again(hub: Any, fetcher: Fetcher, tmp_path: Path) -> None:
    await fetcher.fetch(hub.offers[None], None)
    other = await Swarm.open(SwarmSettings(listen_host="127.0.0.1"))
    try:
        again = await make_fetcher(hub, other, tmp_path).fetch(hub.offers[None], None)
        assert again is None
        assert len(await other.stats()) == 1  # It is seeded.
    finally:
        await other.close()


@pytest.mark.parametrize("damage", ["changed", "missing", "unmarked"])
async def test_what_was_touched_is_verified_anew(hub: Any, fetcher: Fetcher, tmp_path: Path, damage: str) -> None:
    await fetcher.fetch(hub.offers[None], None)
    directory = fetcher.directory(None)
    if damage == "changed":
        (directory / "config.json").write_text("{}")
    elif damage == "missing":
        (directory / "model.safetensors").unlink()
    else:
        directory.with_name(directory.name + ".verified").unlink()
    other = await Swarm.open(SwarmSettings(listen_host="127.0.0.1"))
    try:
        assert await make_fetcher(hub, other, tmp_path).fetch(hub.offers[None], None) is not None
    finally:
        await other.close()
    assert same_files(directory, hub.directory / artefact_name("base", hub.run_id, 0))


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
    forged = tmp_path / "forged" / artefact_name("base", hub.run_id, 0)
    shutil.copytree(hub.directory / forged.name, forged)
    (forged / "config.json").write_text("{}")
    swapped = offer.model_copy(update={"torrent": make_torrent(forged).torrent})
    with pytest.raises(RemoteProtocolError, match="not the one in the signed manifest"):
        await fetcher.fetch(swapped, None)


async def test_files_that_do_not_have_the_signed_hashes_are_deleted(hub: Any, fetcher: Fetcher) -> None:
    """The hub signs a manifest whose torrent is right and whose hashes are not."""
    offer: ArtefactOffer = hub.offers[None]
    manifest = open_offer(offer, hub.me.public_key)
    wrong = tuple(file.model_copy(update={"sha256": "0" * 64}) for file in manifest.files)
    signed = sign_offer(
        manifest.model_copy(update={"files": wrong}),
        hub=hub.me,
        torrent=offer.torrent,
        web_seed_path=offer.web_seed_path,
        peers=offer.peers,
    )
    with pytest.raises(SwarmError, match="not what the hub signed"):
        await fetcher.fetch(signed, None)
    assert not (fetcher.directory(None) / "model.safetensors").exists()
    assert not fetcher.directory(None).with_name(f"{hub.run_id}-base.verified").exists()


async def test_comes_by_the_web_seed_when_there_is_no_peer(hub: Any, tmp_path: Path) -> None:
    offer = hub.offers[None].model_copy(update={"peers": ()})
    swarm = await Swarm.open(SwarmSettings(listen_host="127.0.0.1", web_seed_after_s=0))
    try:
        fetched = await make_fetcher(hub, swarm, tmp_path).fetch(offer, None)
    finally:
        await swarm.close()
    assert fetched is not None and fetched.web_seed_bytes > 0 and fetched.swarm_bytes == 0


needs_memory = pytest.mark.skipif(not shared_memory.AVAILABLE, reason="this system or Python has no such memory")


@pytest.fixture
async def in_memory(hub: Any) -> AsyncIterator[tuple[ArtefactOffer, Segment]]:
    """Version 1, which the hub also holds in memory."""
    await hub.publish(1, announce=False)
    manifest = open_offer(hub.offers[1], hub.me.public_key)
    segment = Segment.of(manifest, hub.directory / manifest.name)
    yield hub.offers[1].model_copy(update={"shared_memory": segment.address}), segment
    if memory_of(segment).is_symlink():
        segment.close()


def memory_of(segment: Segment) -> Path:
    return Path(f"/proc/self/fd/{segment.address.descriptor}")


@needs_memory
async def test_what_the_hub_holds_in_memory_is_read_and_verified_and_seeded(
    hub: Any, fetcher: Fetcher, swarm: Swarm, in_memory: tuple[ArtefactOffer, Segment]
) -> None:
    offer, _ = in_memory
    manifest = open_offer(offer, hub.me.public_key)
    fetched = await fetcher.fetch(offer.model_copy(update={"peers": ()}), 1)
    assert fetched is not None and (fetched.policy_version, fetched.info_hash.hex()) == (1, manifest.info_hash)
    assert fetched.shared_memory_bytes == manifest.total_bytes
    assert fetched.swarm_bytes == fetched.web_seed_bytes == 0
    assert same_files(fetcher.directory(1), hub.directory / manifest.name)
    assert [torrent.complete for torrent in (await swarm.stats()).values()] == [True]
    assert await fetcher.fetch(offer, 1) is None


@needs_memory
@pytest.mark.parametrize("change", ["closed", "other bytes", "short", "elsewhere"])
async def test_the_swarm_takes_over_when_memory_does_not_have_it(
    hub: Any,
    fetcher: Fetcher,
    in_memory: tuple[ArtefactOffer, Segment],
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
    assert fetched is not None and fetched.swarm_bytes > 0
    assert fetched.shared_memory_bytes == 0
    assert same_files(fetcher.directory(1), hub.directory / fetcher.directory(1).name)
    (told,) = [record for record in caplog.records if "memory" in record.message]
    assert told.levelno == logging.DEBUG


@needs_memory
async def test_a_reader_that_is_cancelled_has_ended_before_its_files_are_deleted(
    fetcher: Fetcher, in_memory: tuple[ArtefactOffer, Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, begun, may_go_on = shared_memory.read, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(address: Any, manifest: Manifest, directory: Path) -> None:
        loop.call_soon_threadsafe(begun.set)
        may_go_on.wait()
        honest(address, manifest, directory)

    monkeypatch.setattr(shared_memory, "read", slow)
    fetch = asyncio.create_task(fetcher.fetch(in_memory[0], 1))
    await begun.wait()
    fetch.cancel()
    await asyncio.sleep(0)
    assert not fetch.done()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    await fetcher.remove(1)
    assert not fetcher.directory(1).exists()


async def test_removing_deletes_files_and_stops_seeding(hub: Any, fetcher: Fetcher, swarm: Swarm) -> None:
    await hub.publish(1, announce=False)
    await fetcher.fetch(hub.offers[1], 1)
    assert len(await swarm.stats()) == 1
    await fetcher.remove(1)
    assert not fetcher.directory(1).exists()
    assert len(await swarm.stats()) == 0
    await fetcher.remove(1)


async def test_what_does_not_fit_on_the_disk_is_not_begun(
    hub: Any, fetcher: Fetcher, swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = sum(path.stat().st_size for path in (hub.directory / f"{hub.run_id}-base").iterdir())
    disk = {"total": 10 * total, "free": total}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(**disk))
    with pytest.raises(StorageError, match=r"does not fit(.|\n)*MiB free(.|\n)*Free some space"):
        await fetcher.fetch(hub.offers[None], None)
    assert len(await swarm.stats()) == 0 and not fetcher.directory(None).exists()
    disk["free"] = total + total // 2 + 1  # Five hundredths of the disk stay free.
    assert await fetcher.fetch(hub.offers[None], None) is not None
    fetcher.directory(None).with_name(fetcher.directory(None).name + ".verified").unlink()
    await swarm.remove(bytes.fromhex(open_offer(hub.offers[None], hub.me.public_key).info_hash))
    disk["free"] = 0  # Nothing is missing.
    assert await fetcher.fetch(hub.offers[None], None) is not None


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
    with pytest.raises(StorageError, match="disk is full"):
        await fetcher.fetch(hub.offers[None], None)
    monkeypatch.undo()
    assert await fetcher.fetch(hub.offers[None], None) is not None


async def test_what_cannot_be_deleted_now_is_deleted_at_the_next_start(
    hub: Any, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await hub.publish(1, announce=False)
    await fetcher.fetch(hub.offers[1], 1)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "The file is in use")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    await fetcher.remove(1)
    fetcher.delete_leftovers(2)
    assert caplog.text.count("is not deleted yet") == 2
    with pytest.raises(StorageError, match="in use"):
        delete_artefact(fetcher.directory(1))
    monkeypatch.undo()
    fetcher.delete_leftovers(2)
    assert not fetcher.directory(1).exists()


async def test_a_base_is_named_by_its_content(hub: Any, fetcher: Fetcher, tmp_path: Path, swarm: Swarm) -> None:
    await fetcher.fetch(hub.offers[None], None)
    first = fetcher.base_content
    directory = tmp_path / "other" / f"{hub.run_id}-base"
    shutil.copytree(hub.directory / directory.name, directory)
    (directory / "model.safetensors").write_bytes(b"other weights")
    await swarm.remove(bytes.fromhex(open_offer(hub.offers[None], hub.me.public_key).info_hash))
    await fetcher.fetch(await hub.offer(None, directory), None)
    assert len(first) == len(fetcher.base_content) == 32 and first != fetcher.base_content
    assert same_files(fetcher.directory(None), directory)


async def test_a_damaged_marker_counts_as_none(hub: Any, fetcher: Fetcher, swarm: Swarm) -> None:
    await fetcher.fetch(hub.offers[None], None)
    fetcher.directory(None).with_name(f"{hub.run_id}-base.verified").write_bytes(b"\xff")
    await swarm.remove(bytes.fromhex(open_offer(hub.offers[None], hub.me.public_key).info_hash))
    assert await fetcher.fetch(hub.offers[None], None) is not None


def test_leftovers_are_this_runs_other_versions(hub: Any, fetcher: Fetcher, tmp_path: Path) -> None:
    run = hub.run_id
    names = [f"{run}-v000001", f"{run}-v000002", f"{run}-base", f"{run}1-v000001", "other-v000001"]
    for name in names:
        (tmp_path / "artefacts" / name).mkdir(parents=True)
    (tmp_path / "artefacts" / f"{run}-v000001.verified").write_text("")
    fetcher.delete_leftovers(2)
    assert sorted(path.name for path in (tmp_path / "artefacts").iterdir()) == sorted(names[1:])
