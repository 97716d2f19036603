"""The fetcher with a real swarm, from a hub that seeds for real."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from echo_node.net.address import HubAddress
from echo_node.net.fetcher import Fetcher, Source, delete_artefact
from echo_shared.artefacts import artefact_name, sign_offer
from echo_shared.errors import RemoteProtocolError, SwarmError
from echo_shared.identity import Identity
from echo_shared.messages import ArtefactOffer
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
    from echo_shared.artefacts import open_offer

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
    assert not fetcher.directory(None).with_name("run-1-base.verified").exists()


async def test_comes_by_the_web_seed_when_there_is_no_peer(hub: Any, tmp_path: Path) -> None:
    offer = hub.offers[None].model_copy(update={"peers": ()})
    swarm = await Swarm.open(SwarmSettings(listen_host="127.0.0.1", web_seed_after_s=0))
    try:
        fetched = await make_fetcher(hub, swarm, tmp_path).fetch(offer, None)
    finally:
        await swarm.close()
    assert fetched is not None and fetched.web_seed_bytes > 0 and fetched.swarm_bytes == 0


async def test_removing_deletes_files_and_stops_seeding(hub: Any, fetcher: Fetcher, swarm: Swarm) -> None:
    await hub.publish(1, announce=False)
    await fetcher.fetch(hub.offers[1], 1)
    assert len(await swarm.stats()) == 1
    await fetcher.remove(1)
    assert not fetcher.directory(1).exists()
    assert len(await swarm.stats()) == 0
    await fetcher.remove(1)


def test_leftovers_are_this_runs_other_versions(fetcher: Fetcher, tmp_path: Path) -> None:
    names = ["run-1-v000001", "run-1-v000002", "run-1-base", "run-11-v000001", "other-v000001"]
    for name in names:
        (tmp_path / "artefacts" / name).mkdir(parents=True)
    (tmp_path / "artefacts" / "run-1-v000001.verified").write_text("")
    assert [path.name for path in fetcher.leftovers(2)] == ["run-1-v000001"]
    delete_artefact(tmp_path / "artefacts" / "run-1-v000001")
    assert fetcher.leftovers(2) == []
