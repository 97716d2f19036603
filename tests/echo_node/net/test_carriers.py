"""Carriers (encrypted packages of model files) are seeded to other nodes over a real swarm."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from echo_node.net.carriers import SERVED, Carriers
from echo_shared.artefacts.manifest import PAYLOAD_NAME, Manifest, ManifestFile
from echo_shared.swarm import Swarm, SwarmSettings, make_torrent, open_swarm, read_torrent
from echo_shared.swarm.torrent import TorrentLayout


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    swarm = await open_swarm(SwarmSettings(listen_host="127.0.0.1"))
    yield swarm
    await swarm.close()


@pytest.fixture
def carriers(swarm: Swarm, tmp_path: Path) -> Carriers:
    return Carriers(swarm, tmp_path, ())


def put(carriers: Carriers, version: int, content: bytes = b"sealed") -> tuple[Manifest, TorrentLayout]:
    """Write a complete carrier (encrypted files of an artefact) to the disk; version 0 is the base."""
    manifest = Manifest(
        kind="policy" if version else "base",
        run_id="run",
        name=f"run-v{version:06d}" if version else "run-base",
        policy_version=version,
        carrier="keyframe" if version else "files",
        key_id=1,
        info_hash="00" * 20,
        files=(ManifestFile(path="a.json", size_bytes=1, sha256="00" * 32),),
    )
    carriers.path(manifest).mkdir(exist_ok=True)
    (carriers.path(manifest) / PAYLOAD_NAME).write_bytes(content)
    return manifest, read_torrent(make_torrent(carriers.path(manifest)).torrent)


async def serve(carriers: Carriers, manifest: Manifest, layout: TorrentLayout) -> None:
    await carriers.serve(manifest, layout)
    await carriers.settle(manifest, layout)


def here(carriers: Carriers) -> list[str]:
    return sorted(path.name for path in carriers.directory.iterdir())


async def test_the_newest_few_are_served(carriers: Carriers, swarm: Swarm) -> None:
    for version in range(1, SERVED + 3):
        await serve(carriers, *put(carriers, version))
    assert here(carriers) == [f"run-v{version:06d}.k" for version in range(3, SERVED + 3)]
    assert len(await swarm.stats()) == SERVED


async def test_an_incomplete_carrier_is_not_served(carriers: Carriers, swarm: Swarm) -> None:
    manifest, layout = put(carriers, 1)
    (carriers.path(manifest) / PAYLOAD_NAME).write_bytes(b"seal")
    await serve(carriers, manifest, layout)
    assert await swarm.stats() == {}


async def test_an_old_carrier_is_kept_until_it_is_used(carriers: Carriers) -> None:
    for version in range(2, SERVED + 2):
        await serve(carriers, *put(carriers, version))
    old = put(carriers, 1)
    await carriers.serve(*old)
    assert carriers.path(old[0]).exists()
    await carriers.settle(*old)
    assert not carriers.path(old[0]).exists()


async def test_a_version_that_came_another_way_is_not_served(carriers: Carriers, swarm: Swarm) -> None:
    await carriers.settle(*put(carriers, 0))
    assert await swarm.stats() == {}


async def test_another_carrier_of_the_same_name_makes_way(carriers: Carriers, swarm: Swarm) -> None:
    first = put(carriers, 1)
    await serve(carriers, *first)
    second = make_torrent_elsewhere(carriers)
    await carriers.begin(second)
    assert here(carriers) == ["elsewhere"] and await swarm.stats() == {}
    await carriers.begin(second)
    assert here(carriers) == ["elsewhere"]


def make_torrent_elsewhere(carriers: Carriers) -> TorrentLayout:
    directory = carriers.directory / "elsewhere" / "run-v000001.k"
    directory.mkdir(parents=True)
    (directory / PAYLOAD_NAME).write_bytes(b"sealed anew")
    return read_torrent(make_torrent(directory).torrent)


async def test_an_unused_carrier_is_not_dropped_as_unwanted(carriers: Carriers, swarm: Swarm) -> None:
    used, complete, coming = put(carriers, 1), put(carriers, 2, b"2"), put(carriers, 3, b"3")
    await serve(carriers, *used)
    await carriers.serve(*complete)
    await carriers.begin(coming[1])
    await carriers.unwanted([one[1].info_hash for one in (used, complete, coming)])
    assert here(carriers) == ["run-v000002.k", "run-v000003.k"]
    assert list(await swarm.stats()) == [complete[1].info_hash]


async def test_removing_an_artefact_removes_all_its_carriers(carriers: Carriers) -> None:
    await serve(carriers, *put(carriers, 1))
    await serve(carriers, *put(carriers, 11))
    await carriers.discard_of("run-v000001")
    assert here(carriers) == ["run-v000011.k"]


async def test_a_stop_leaves_the_files(carriers: Carriers, swarm: Swarm) -> None:
    await serve(carriers, *put(carriers, 1))
    await carriers.stop_serving()
    assert here(carriers) == ["run-v000001.k"] and await swarm.stats() == {}


def test_leftovers_are_those_of_the_run_that_are_not_kept(carriers: Carriers) -> None:
    names = ["run-v000001.k", "run-v000002.d1", "run-v000002.k", "run-base.s", "run1-v000001.k", "other-base.s"]
    for name in names:
        (carriers.directory / name).mkdir()
    carriers.delete_leftovers(re.compile(r"run-v\d+|run-base"), ["run-base", "run-v000002"])
    assert here(carriers) == sorted(names[1:])
