"""Published versions can be fetched from a real swarm and are readable only with the run's key, also after the hub was
stopped at any point.
"""

import asyncio
import random
import shutil
import sys
from pathlib import Path

import pytest

from echo_hub.net.host_memory import HostMemory
from echo_hub.net.publisher import Publisher
from echo_hub.run.offered_gguf import OfferedGguf
from echo_shared import delta
from echo_shared.artefacts.hashed_files import describe_file, verify_files
from echo_shared.artefacts.manifest import open_offer
from echo_shared.artefacts.sealing import CHUNK_BYTES
from echo_shared.errors import ConfigError, SwarmError
from echo_shared.swarm import shared_memory
from echo_shared.wire.messages import Way


def tree(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


async def test_two_nodes_fetch_a_version_from_its_offer_and_then_serve_a_third(
    hub, make_adapter, open_swarm, tmp_path
) -> None:
    await hub.publisher.publish_policy(1, make_adapter(1))
    swarms = [await open_swarm() for _ in range(3)]

    async def fetch(number: int):
        offer = hub.offer(1, node_number=number)
        manifest = open_offer(offer, hub.identity.public_key)
        stats = await swarms[number].fetch(
            offer.torrent,
            tmp_path / str(number),
            peers=offer.peers,
            tracker_urls=[hub.announce_url(number)],
            web_seed_url=hub.url + offer.web_seed_path,
        )
        hub.read(manifest, tmp_path / str(number) / manifest.carrier_name, tmp_path / f"read{number}")
        return offer, manifest, stats

    (offer, manifest, stats), _ = await asyncio.gather(fetch(0), fetch(1))
    assert offer.peers == (("localhost", hub.swarm.port),)
    assert (manifest.policy_version, manifest.parent, manifest.carrier) == (1, 0, "keyframe")
    assert {file.path for file in manifest.files} == {"adapter_config.json", "adapter_model.safetensors"}
    assert stats.swarm_bytes >= hub.publisher.carrier(1).total_bytes

    await hub.swarm.close()
    offer, _, stats = await fetch(2)
    assert {port for _, port in offer.peers} == {hub.swarm.port, swarms[0].port, swarms[1].port}
    assert stats.web_seed_bytes == 0


async def test_a_version_travels_as_a_delta_where_that_is_smaller(hub, make_adapter, tmp_path) -> None:
    publish = hub.publisher.publish_policy
    await publish(1, make_adapter(1))
    await publish(2, make_adapter(2), delta_parent=1)
    offer, manifest, carrier = hub.offer(2), hub.manifest(2), hub.publisher.carrier(2)
    assert (manifest.carrier, manifest.delta_parent, offer.delta_parent) == ("delta", 1, 1)
    assert carrier.directory.name == manifest.carrier_name == "tiny-run-v000002.d1"
    assert carrier.total_bytes < hub.publisher.carrier(1).total_bytes
    assert not (hub.run_dir / "artefacts" / "tiny-run-v000002.k").exists()
    hub.read(manifest, carrier.directory, tmp_path / "read", parent=tmp_path / "learner" / "1")
    assert tree(tmp_path / "read") == {
        name: data for name, data in tree(make_adapter(2)).items() if name != "optimizer.pt"
    }

    shutil.copytree(make_adapter(3), tmp_path / "other")
    (tmp_path / "other" / "adapter_model.safetensors").write_bytes(random.Random(1).randbytes(100_000))
    await publish(4, tmp_path / "other", delta_parent=2)
    assert (hub.manifest(4).carrier, hub.offer(4).delta_parent) == ("keyframe", None)


@pytest.mark.parametrize("parent", ["never published", "the base", "its files are gone", "its files have changed"])
async def test_without_the_parents_files_it_is_a_keyframe(hub, make_adapter, model_dir, parent) -> None:
    await hub.publisher.publish_base(model_dir)
    await hub.publisher.publish_policy(1, make_adapter(1))
    files = hub.run_dir / "artefacts" / "tiny-run-v000001"
    if parent == "its files are gone":
        shutil.rmtree(files)
    if parent == "its files have changed":
        (files / "adapter_config.json").write_text("{}")
    number = {"never published": 7, "the base": 0}.get(parent, 1)
    await hub.publisher.publish_policy(2, make_adapter(2), delta_parent=number)
    assert hub.manifest(2).carrier == "keyframe"


async def test_the_keyframe_of_a_delta_is_made_once_when_it_is_wanted(hub, make_adapter, tmp_path) -> None:
    publisher = hub.publisher
    await publisher.publish_policy(1, make_adapter(1))
    await publisher.publish_policy(2, make_adapter(2), delta_parent=1)
    as_published = publisher.carrier(2)
    with pytest.raises(SwarmError, match="as a keyframe"):
        publisher.carrier(2, keyframe=True)
    await asyncio.gather(*(publisher.publish_keyframe(2) for _ in range(3)))
    keyframe = publisher.carrier(2, keyframe=True)
    assert publisher.carrier(2) == as_published
    assert publisher.info_hashes(2) == (as_published.info_hash, keyframe.info_hash)
    assert publisher.knows(keyframe.info_hash, 2) and publisher.knows(as_published.info_hash, 2)
    manifest = hub.manifest(2, keyframe=True)
    assert manifest == keyframe.manifest
    assert (manifest.carrier, manifest.delta_parent) == ("keyframe", None)
    assert manifest.content == as_published.manifest.content
    hub.read(manifest, keyframe.directory, tmp_path / "read")

    before = publisher.carrier(1)
    await publisher.publish_keyframe(1)
    assert publisher.carrier(1, keyframe=True) == publisher.carrier(1) == before
    with pytest.raises(SwarmError, match="not published"):
        await publisher.publish_keyframe(9)


async def test_a_carrier_without_its_key_is_unreadable(hub, make_adapter, model_dir, open_swarm, tmp_path) -> None:
    await hub.publisher.publish_base(model_dir)
    await hub.publisher.publish_policy(1, make_adapter(1))
    stranger = await open_swarm()
    delta.encode(hub.run_dir / "artefacts" / hub.manifest(1).name, tmp_path / "payload")
    secrets = {
        0: [*tree(model_dir).values()],
        1: [*tree(make_adapter(1)).values(), (tmp_path / "payload").read_bytes()],
    }
    for version, contents in secrets.items():
        carrier = hub.publisher.carrier(version)  # The outsider has the torrent and the address, but no passkey.
        await stranger.fetch(carrier.torrent, tmp_path / "stranger", peers=[("127.0.0.1", hub.swarm.port)])
        fetched = b"".join(tree(tmp_path / "stranger" / carrier.directory.name).values())
        assert len(fetched) == carrier.total_bytes
        for content in contents:
            step = max(1, len(content) // 50)
            assert not any(content[at : at + 8] in fetched for at in range(0, len(content) - 8, step))


@pytest.mark.skipif(not shared_memory.AVAILABLE, reason="this system or Python has no such memory")
async def test_a_node_on_this_host_is_offered_new_versions_in_memory(hub, make_adapter, model_dir, tmp_path) -> None:
    await hub.publisher.publish_base(model_dir)
    assert hub.offer(0).shared_memory is None
    await hub.publisher.publish_policy(1, make_adapter(1))
    await hub.publisher.publish_policy(2, make_adapter(2), delta_parent=1)
    offer, manifest = hub.offer(2), hub.manifest(2)
    assert offer.shared_memory is not None
    shared_memory.read(offer.shared_memory, manifest, tmp_path / "node")
    verify_files(manifest, tmp_path / "node")
    elsewhere = hub.publisher.offer_for(2, node_id="a", node_ip="192.0.2.1", hub_host="hub", way=Way.INLINE)
    assert elsewhere.shared_memory is None
    assert elsewhere.way is Way.INLINE


async def test_a_base_is_published_once_and_readable_without_its_directory(hub, model_dir, tmp_path) -> None:
    content = tree(model_dir)
    await hub.publisher.publish_base(model_dir)
    offer, manifest = hub.offer(0), hub.manifest(0)
    assert (manifest.kind, manifest.policy_version, manifest.parent, manifest.source) == ("base", 0, None, None)
    shutil.rmtree(model_dir)
    await hub.publisher.publish_base(model_dir)
    assert hub.offer(0) == offer
    hub.read(manifest, hub.publisher.carrier(0).directory, tmp_path / "read")
    assert tree(tmp_path / "read") == {file.path: content[file.path] for file in manifest.files}


async def test_a_base_from_the_model_hub_names_its_source(open_hub, model_dir) -> None:
    hub, source = await open_hub(), f"owner/name@{'0a' * 20}"
    await hub.publisher.publish_base(model_dir)
    before = hub.publisher.carrier(0)
    await hub.publisher.publish_base(model_dir, source=source)
    assert hub.manifest(0).source == source
    await hub.swarm.close()
    again = await open_hub()
    assert again.manifest(0) == hub.manifest(0)
    await again.publisher.publish_base(model_dir)
    assert again.publisher.carrier(0) == before


def offered(directory: Path, content: bytes) -> OfferedGguf:
    directory.mkdir(exist_ok=True)
    files = {"config.json": directory / "config.json", "m.gguf": directory / "m.gguf"}
    for path in files.values():
        path.write_bytes(content)
    described = tuple(describe_file(path, name=name) for name, path in files.items())
    return OfferedGguf(parts=(files["m.gguf"],), files=files, described=described, weights="q8_0")


async def test_a_base_is_also_published_as_a_gguf_file(open_hub, model_dir, tmp_path) -> None:
    hub = await open_hub()
    file = offered(tmp_path / "gguf", b"quantised" * 1_000)
    await hub.publisher.publish_base(model_dir)
    await hub.publisher.publish_gguf(None)
    assert not hub.publisher.has_gguf
    base = hub.offer(0)
    await hub.publisher.publish_gguf(file)
    carrier = hub.publisher.carrier(0, gguf=True)
    assert hub.publisher.has_gguf and hub.offer(0) == base, "the weights are offered as before"
    assert (carrier.manifest.kind, carrier.manifest.carrier) == ("base", "gguf")
    assert carrier.manifest.name == hub.manifest(0).name and carrier.manifest.content != hub.manifest(0).content
    assert hub.publisher.info_hashes(0) == (hub.publisher.carrier(0).info_hash, carrier.info_hash)
    assert hub.publisher.knows(carrier.info_hash, None)
    assert hub.publisher.file(carrier.directory.name, "m.gguf.sealed") == carrier.directory / "m.gguf.sealed"
    shutil.rmtree(tmp_path / "gguf")
    hub.read(carrier.manifest, carrier.directory, tmp_path / "read")
    assert tree(tmp_path / "read") == dict.fromkeys(("config.json", "m.gguf"), b"quantised" * 1_000)
    assert carrier.directory.name == "tiny-run-base.g"
    await hub.swarm.close()

    again = await open_hub()
    assert again.publisher.carrier(0, gguf=True) == carrier and again.manifest(0) == hub.manifest(0)
    await again.publisher.publish_gguf(file)
    assert again.publisher.carrier(0, gguf=True) == carrier, "nothing is sealed twice"


async def test_another_gguf_file_replaces_the_one_before(hub, model_dir, tmp_path) -> None:
    await hub.publisher.publish_base(model_dir)
    base = hub.publisher.carrier(0)
    seen = []
    for content in (b"one", b"two"):
        await hub.publisher.publish_gguf(offered(tmp_path / "gguf", content))
        seen.append(hub.publisher.carrier(0, gguf=True))
        assert set(await hub.swarm.stats()) == {base.info_hash, seen[-1].info_hash}
    assert seen[0].manifest.content != seen[1].manifest.content
    await hub.publisher.publish_gguf(None)
    with pytest.raises(SwarmError, match="as a GGUF file"):
        hub.publisher.carrier(0, gguf=True)
    assert set(await hub.swarm.stats()) == {base.info_hash} and hub.publisher.carrier(0) == base
    left = {path.name for path in (hub.run_dir / "artefacts").iterdir()}
    assert left == {base.directory.name, f"{base.directory.name}.torrent", f"{base.directory.name}.manifest.json"}


async def test_a_base_made_again_leaves_the_gguf_file(open_hub, model_dir, tmp_path) -> None:
    hub = await open_hub()
    await hub.publisher.publish_base(model_dir)
    await hub.publisher.publish_gguf(offered(tmp_path / "gguf", b"quantised"))
    carrier = hub.publisher.carrier(0, gguf=True)
    await hub.swarm.close()
    (hub.publisher.carrier(0).directory / "config.json.sealed").unlink()
    again = await open_hub()
    with pytest.raises(SwarmError):
        again.publisher.carrier(0)
    await again.publisher.publish_base(model_dir)
    again.read(carrier.manifest, again.publisher.carrier(0, gguf=True).directory, tmp_path / "read")


async def test_an_incomplete_base_is_a_config_error(hub, tmp_path) -> None:
    with pytest.raises(ConfigError, match="incomplete"):
        await hub.publisher.publish_base(tmp_path)
    assert not hub.publisher.has(0)


async def test_the_learner_may_write_its_file_again(hub, make_adapter, tmp_path) -> None:
    adapter = make_adapter(1)
    await hub.publisher.publish_policy(1, adapter)
    offer = hub.offer(1)
    with (adapter / "adapter_model.safetensors").open("r+b") as file:
        file.write(bytes(1_000))
    await hub.publisher.publish_policy(1, adapter)
    assert hub.offer(1) == offer
    await hub.publisher.publish_policy(2, make_adapter(2), delta_parent=1)
    hub.read(hub.manifest(1), hub.publisher.carrier(1).directory, tmp_path / "one")
    hub.read(hub.manifest(2), hub.publisher.carrier(2).directory, tmp_path / "two", parent=tmp_path / "one")


async def test_a_restart_seeds_the_same_artefacts_with_the_same_signatures(
    open_hub, model_dir, make_adapter, open_swarm, tmp_path
) -> None:
    hub = await open_hub()
    await hub.publisher.publish_base(model_dir)
    await hub.publisher.publish_policy(1, make_adapter(1))
    await hub.publisher.publish_policy(2, make_adapter(2), delta_parent=1)
    await hub.publisher.publish_keyframe(2)

    def told(which) -> list[bytes]:
        offers = [*map(which.offer, (0, 1, 2)), which.offer(2, keyframe=True)]
        return [part for offer in offers for part in (offer.manifest, offer.signature, offer.torrent)]

    before, keys, files = told(hub), hub.publisher.run_keys(), tree(hub.run_dir)
    await hub.swarm.close()

    again = await open_hub()
    assert told(again) == before
    assert again.manifest(2).carrier == "delta"
    assert again.publisher.run_keys() == keys
    assert tree(again.run_dir) == files
    node = await open_swarm()
    offer = again.offer(1)
    await node.fetch(offer.torrent, tmp_path / "node", peers=offer.peers, tracker_urls=[again.announce_url(1)])


async def test_barring_a_node_seals_later_versions_with_a_key_it_lacks(open_hub, make_adapter) -> None:
    hub = await open_hub()
    await hub.publisher.publish_policy(1, make_adapter(1))
    (first,) = hub.publisher.run_keys()
    assert hub.publisher.bar({f"{3:020x}"})
    assert not hub.publisher.bar([f"{3:020x}"])
    _, second = hub.publisher.run_keys()
    assert second.key_id > first.key_id and second.key != first.key
    await hub.publisher.publish_policy(2, make_adapter(2), delta_parent=1)
    assert [hub.manifest(version).key_id for version in (1, 2)] == [first.key_id, second.key_id]
    await hub.publisher.publish_keyframe(2)
    assert hub.manifest(2, keyframe=True).key_id == second.key_id
    await hub.swarm.close()

    again = await open_hub(kept_versions=1)
    assert again.publisher.run_keys() == (second,), "the first key opens nothing that is left"
    assert again.publisher.bar({f"{3:020x}", "barred while the hub was down"})
    assert [key.key_id for key in again.publisher.run_keys()] == [second.key_id, second.key_id + 1]


async def test_a_node_barred_during_sealing_cannot_read_the_version(hub, make_adapter, tmp_path) -> None:
    (before,) = hub.publisher.run_keys()
    publishing = asyncio.create_task(hub.publisher.publish_policy(1, make_adapter(1)))
    await asyncio.sleep(0)  # A thread now encrypts the version with the old key.
    assert hub.publisher.bar({"a"})
    await publishing
    (after,) = hub.publisher.run_keys()
    assert hub.manifest(1).key_id == after.key_id > before.key_id
    hub.read(hub.manifest(1), hub.publisher.carrier(1).directory, tmp_path / "read")


async def test_versions_sealed_with_lost_keys_are_published_again(open_hub, model_dir, make_adapter, caplog) -> None:
    hub = await open_hub()
    await hub.publisher.publish_base(model_dir)
    await hub.publisher.publish_policy(1, make_adapter(1))
    await hub.swarm.close()
    (hub.run_dir / "run_keys.json").unlink()
    again = await open_hub()
    assert "sealed with a key that is lost" in caplog.text
    assert not again.publisher.has(0) and not again.publisher.has(1)
    await again.publisher.publish_policy(1, make_adapter(1))
    again.read(again.manifest(1), again.publisher.carrier(1).directory, hub.run_dir.parent / "read")


async def test_a_node_barred_while_seeding_starts_cannot_read_the_version(hub, make_adapter, monkeypatch) -> None:
    seed, barred = hub.swarm.seed, []

    async def bar_meanwhile(torrent: bytes, directory: Path) -> None:
        await seed(torrent, directory)
        if not barred:
            barred.append(torrent)
            hub.publisher.bar({"a"})

    monkeypatch.setattr(hub.swarm, "seed", bar_meanwhile)
    await hub.publisher.publish_policy(1, make_adapter(1))
    assert [key.key_id for key in hub.publisher.run_keys()] == [hub.manifest(1).key_id]
    assert barred != [hub.publisher.carrier(1).torrent]
    assert set(await hub.swarm.stats()) == {hub.publisher.carrier(1).info_hash}


async def test_keys_of_unpublished_versions_are_forgotten(open_hub, make_adapter) -> None:
    hub = await open_hub(kept_versions=1)
    await hub.publisher.publish_policy(1, make_adapter(1))
    (first,) = hub.publisher.run_keys()
    hub.publisher.bar({"a"})
    assert first.key.hex() in (hub.run_dir / "run_keys.json").read_text()
    await hub.publisher.publish_policy(2, make_adapter(2))
    assert first.key.hex() not in (hub.run_dir / "run_keys.json").read_text()


async def test_a_publisher_lists_its_published_versions(open_hub, make_adapter, model_dir) -> None:
    hub = await open_hub(kept_versions=1)
    publisher = hub.publisher
    await publisher.publish_base(model_dir)
    await publisher.publish_policy(1, make_adapter(1))
    first = publisher.carrier(1).info_hash
    await publisher.publish_policy(2, make_adapter(2))
    base, second = publisher.carrier(0).info_hash, publisher.carrier(2).info_hash
    assert publisher.knows(base, None)
    assert publisher.knows(second, 2)
    others = [(base, 0), (base, 2), (second, None), (first, 1), (second, 3), (bytes(20), 2)]
    assert not any(publisher.knows(*other) for other in others)
    assert publisher.published() == (2,)
    assert publisher.info_hashes(1) == ()
    with pytest.raises(ValueError, match="0 is the base"):
        await publisher.publish_policy(0, make_adapter(1))


async def test_only_the_newest_versions_are_kept_in_the_swarm(open_hub, make_adapter, model_dir) -> None:
    hub = await open_hub(kept_versions=2)
    publisher, artefacts = hub.publisher, hub.run_dir / "artefacts"
    await publisher.publish_base(model_dir)
    for version in (1, 2, 3, 4):
        await publisher.publish_policy(version, make_adapter(version), delta_parent=version - 1)
        await publisher.publish_keyframe(version)
    kept = {info_hash for version in (0, 3, 4) for info_hash in publisher.info_hashes(version)}
    assert len(kept) == 5
    assert set(await hub.swarm.stats()) == kept
    with pytest.raises(SwarmError, match="published: 0, 3, 4"):
        publisher.carrier(2)
    assert publisher.file("tiny-run-v000002.k", "payload.sealed") is None
    names = {path.name for path in artefacts.iterdir()}
    assert {name.partition(".")[0] for name in names} == {"tiny-run-base", "tiny-run-v000003", "tiny-run-v000004"}
    await hub.swarm.close()

    again = await open_hub(kept_versions=2)
    assert set(await again.swarm.stats()) == kept
    assert {path.name for path in artefacts.iterdir()} == names

    await again.swarm.close()
    fewer = await open_hub(kept_versions=1)
    assert fewer.publisher.published() == (4,)
    assert not list(artefacts.glob("tiny-run-v000003*"))


async def test_a_version_in_evaluation_stays_published(open_hub, make_adapter) -> None:
    hub = await open_hub(kept_versions=2)
    publish = hub.publisher.publish_policy
    adapters = {version: make_adapter(version) for version in range(1, 7)}
    for version in (1, 2, 3, 4):
        await publish(version, adapters[version])
    hub.publisher.keep(1)
    await asyncio.gather(publish(1, adapters[1]), publish(1, adapters[1]))
    assert len(hub.publisher.info_hashes(1)) == 1
    await publish(5, adapters[5])
    assert hub.publisher.published() == (1, 4, 5)
    hub.publisher.keep(4)
    await publish(6, adapters[6])
    assert [version for version in range(7) if hub.publisher.has(version)] == [4, 5, 6]


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of file size there")
async def test_on_a_full_disk_nothing_is_half_published(hub, make_adapter) -> None:
    import resource

    from echo_shared.errors import StorageError

    await hub.publisher.publish_policy(1, make_adapter(1))
    await hub.publisher.publish_policy(2, make_adapter(2), delta_parent=1)
    adapter, before = make_adapter(3), tree(hub.run_dir)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK_BYTES // 4, limits[1]))
    try:
        with pytest.raises(StorageError):
            await hub.publisher.publish_policy(3, adapter)
        with pytest.raises(StorageError):
            await hub.publisher.publish_keyframe(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tree(hub.run_dir) == before
    await hub.publisher.publish_policy(3, adapter, delta_parent=2)
    await hub.publisher.publish_keyframe(2)
    assert hub.publisher.published() == (1, 2, 3)


async def test_a_hub_without_libtorrent_offers_its_web_seed(make_adapter, tmp_path, hub, open_swarm) -> None:
    from echo_shared.swarm import SwarmSettings
    from echo_shared.swarm.web_seed import WebSeedSwarm

    swarm = WebSeedSwarm(SwarmSettings())
    publisher = Publisher(
        tmp_path / "other", "r", hub.identity, swarm=swarm, tracker=hub.tracker, memory=HostMemory(enabled=False)
    )
    await publisher.reopen()
    await publisher.publish_policy(1, make_adapter(1))
    offer = publisher.offer_for(1, node_id="a", node_ip="127.0.0.1", hub_host="localhost", way=Way.WEB_SEED)
    assert (offer.peers, offer.way) == ((), Way.WEB_SEED)
    assert offer.web_seed_path == f"/artefacts/{hub.tracker.passkey('a')}/"
