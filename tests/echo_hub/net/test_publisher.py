"""Publishing into real swarms, and opening the run again after a stop at any point."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from echo_hub.net.host_memory import HostMemory
from echo_hub.net.publisher import Publisher
from echo_shared import shared_memory
from echo_shared.artefacts import open_offer, verify_files
from echo_shared.errors import ConfigError, StorageError, SwarmError
from echo_shared.messages import ArtefactOffer


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (directory / name).write_bytes(name.encode() * 1_000)
    for name in ("README.md", "pytorch_model.bin", "training_args.bin"):
        (directory / name).write_bytes(b"not needed")
    return directory


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
        offer = hub.publisher.offer_for(1, node_ip="127.0.0.1", hub_host="localhost")
        manifest = open_offer(offer, hub.identity.public_key)
        stats = await swarms[number].fetch(
            offer.torrent,
            tmp_path / str(number),
            peers=offer.peers,
            tracker_urls=[hub.announce_url(number)],
            web_seed_url=hub.url + offer.web_seed_path,
        )
        verify_files(manifest, tmp_path / str(number) / manifest.name)
        return offer, manifest, stats

    (offer, manifest, stats), _ = await asyncio.gather(fetch(0), fetch(1))
    assert offer.peers == (("localhost", hub.swarm.port),)
    assert manifest.policy_version == 1
    assert manifest.parent == 0
    assert {file.path for file in manifest.files} == {"adapter_config.json", "adapter_model.safetensors"}
    assert stats.swarm_bytes >= manifest.total_bytes

    await hub.swarm.close()
    offer, _, stats = await fetch(2)
    assert {port for _, port in offer.peers} == {hub.swarm.port, swarms[0].port, swarms[1].port}
    assert stats.web_seed_bytes == 0


@pytest.mark.skipif(not shared_memory.AVAILABLE, reason="this system or Python has no such memory")
async def test_a_node_on_this_host_is_offered_new_versions_in_memory(hub, make_adapter, model_dir, tmp_path) -> None:
    def offer_to(ip: str, version: int) -> ArtefactOffer:
        return hub.publisher.offer_for(version, node_ip=ip, hub_host="localhost")

    await hub.publisher.publish_base(model_dir)
    assert offer_to("127.0.0.1", 0).shared_memory is None
    await hub.publisher.publish_policy(1, make_adapter(1))
    offer = offer_to("127.0.0.1", 1)
    manifest = open_offer(offer, hub.identity.public_key)
    assert offer.shared_memory is not None
    shared_memory.read(offer.shared_memory, manifest, tmp_path / "node")
    verify_files(manifest, tmp_path / "node")
    assert offer_to("192.0.2.1", 1).shared_memory is None


async def test_the_base_has_what_loading_takes_and_nothing_else(hub, model_dir) -> None:
    offer = await hub.publisher.publish_base(model_dir)
    manifest = open_offer(offer, hub.identity.public_key)
    assert (manifest.kind, manifest.policy_version, manifest.parent) == ("base", 0, None)
    assert [file.path for file in manifest.files] == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    shutil.rmtree(model_dir)
    verify_files(manifest, hub.run_dir / "artefacts" / manifest.name)
    assert await hub.publisher.publish_base(model_dir) == offer


async def test_a_base_in_shards_follows_its_index(hub, model_dir) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (model_dir / name).write_bytes(name.encode() * 10)
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    manifest = open_offer(await hub.publisher.publish_base(model_dir), hub.identity.public_key)
    weights = {file.path for file in manifest.files if "safetensors" in file.path}
    assert weights == {"model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"}


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
async def test_an_incomplete_base_is_a_config_error(hub, model_dir, missing) -> None:
    (model_dir / missing).unlink()
    with pytest.raises(ConfigError, match="not complete") as caught:
        await hub.publisher.publish_base(model_dir)
    assert missing in str(caught.value)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[]"])
async def test_a_broken_index_is_a_config_error(hub, model_dir, index) -> None:
    (model_dir / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match="index"):
        await hub.publisher.publish_base(model_dir)


async def test_a_missing_adapter_is_a_storage_error(hub, tmp_path) -> None:
    with pytest.raises(StorageError, match="cannot be published"):
        await hub.publisher.publish_policy(1, tmp_path / "nowhere")
    with pytest.raises(SwarmError, match="not published"):
        hub.publisher.offer(1)


async def test_the_learner_may_write_its_file_again(hub, make_adapter) -> None:
    adapter = make_adapter(1)
    offer = await hub.publisher.publish_policy(1, adapter)
    with (adapter / "adapter_model.safetensors").open("r+b") as file:
        file.write(bytes(1_000))
    manifest = open_offer(offer, hub.identity.public_key)
    verify_files(manifest, hub.run_dir / "artefacts" / manifest.name)
    assert await hub.publisher.publish_policy(1, adapter) == offer


async def test_a_restart_seeds_the_same_artefacts_with_the_same_signatures(
    open_hub, model_dir, make_adapter, open_swarm, tmp_path
) -> None:
    hub = await open_hub()
    offers = [await hub.publisher.publish_base(model_dir), await hub.publisher.publish_policy(1, make_adapter(1))]
    before = tree(hub.run_dir / "artefacts")
    await hub.swarm.close()

    again = await open_hub()
    assert [again.publisher.offer(version) for version in (0, 1)] == offers
    assert tree(again.run_dir / "artefacts") == before
    node = await open_swarm()
    offer = again.publisher.offer_for(1, node_ip="127.0.0.1", hub_host="127.0.0.1")
    await node.fetch(offer.torrent, tmp_path / "node", peers=offer.peers, tracker_urls=[again.announce_url(1)])


@pytest.mark.parametrize("stopped_after", ["copying", "renaming", "torrent", "manifest in part"])
async def test_what_was_half_published_is_cleared_away_and_done_again(open_hub, make_adapter, stopped_after) -> None:
    hub = await open_hub()
    offer = await hub.publisher.publish_policy(1, make_adapter(1))
    await hub.swarm.close()
    artefacts = hub.run_dir / "artefacts"
    whole = tree(artefacts)
    (directory,) = (path for path in artefacts.iterdir() if path.is_dir())
    manifest, torrent = (artefacts / f"{directory.name}{suffix}" for suffix in (".manifest.json", ".torrent"))
    if stopped_after == "manifest in part":
        manifest.write_bytes(manifest.read_bytes()[:-10])
    else:
        manifest.unlink()
    if stopped_after in ("copying", "renaming"):
        torrent.unlink()
    if stopped_after == "copying":
        directory.rename(directory.with_name(directory.name + ".tmp"))
    (artefacts / "the owner's notes").touch()

    again = await open_hub()
    assert tree(artefacts) == {"the owner's notes": b""}
    with pytest.raises(SwarmError, match="not published"):
        again.publisher.offer(1)
    assert await again.publisher.publish_policy(1, hub.run_dir.parent / "learner" / "1") == offer
    assert tree(artefacts) == {**whole, "the owner's notes": b""}


@pytest.mark.parametrize("damage", ["missing file", "short file", "missing torrent", "other torrent"])
async def test_a_damaged_artefact_is_not_seeded_again(open_hub, make_adapter, damage, tmp_path) -> None:
    hub = await open_hub()
    offer = await hub.publisher.publish_policy(1, make_adapter(1))
    await hub.publisher.publish_policy(2, make_adapter(2))
    await hub.swarm.close()
    directory = hub.run_dir / "artefacts" / "tiny-run-v000001"
    torrent = directory.with_name(f"{directory.name}.torrent")
    match damage:
        case "missing file":
            (directory / "adapter_config.json").unlink()
        case "short file":
            (directory / "adapter_config.json").write_text("{")
        case "missing torrent":
            torrent.unlink()
        case "other torrent":
            shutil.copy(directory.with_name("tiny-run-v000002.torrent"), torrent)
    again = await open_hub()
    assert again.publisher.offer(2)
    assert not directory.exists()
    with pytest.raises(SwarmError):
        again.publisher.offer(1)
    assert await again.publisher.publish_policy(1, tmp_path / "learner" / "1") == offer, "and can be published again"
    await again.swarm.close()
    assert (await open_hub()).publisher.offer(1) == offer


async def test_it_knows_what_it_has_published(open_hub, make_adapter, model_dir) -> None:
    hub = await open_hub(kept_versions=1)
    offers = [
        await hub.publisher.publish_base(model_dir),
        await hub.publisher.publish_policy(1, make_adapter(1)),
        await hub.publisher.publish_policy(2, make_adapter(2)),
    ]
    hashes = [bytes.fromhex(open_offer(offer, hub.identity.public_key).info_hash) for offer in offers]
    assert hub.publisher.knows(hashes[0], None)
    assert hub.publisher.knows(hashes[2], 2)
    others = [(hashes[0], 0), (hashes[0], 2), (hashes[2], None), (hashes[1], 1), (hashes[2], 3), (bytes(20), 2)]
    assert not any(hub.publisher.knows(*other) for other in others)


async def test_what_cannot_be_deleted_goes_at_the_next_start(open_hub, make_adapter, monkeypatch, caplog) -> None:
    def busy(path: Path, *, ignore_errors: bool = False, missing_ok: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(f"{path} is being served")

    hub = await open_hub(kept_versions=1)
    await hub.publisher.publish_policy(1, make_adapter(1))
    await hub.publisher.publish_policy(2, make_adapter(2))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", busy)
        await hub.publisher.publish_policy(3, make_adapter(3))
        patch.setattr(shutil, "rmtree", busy)
        await hub.publisher.publish_policy(4, make_adapter(4))
        await hub.swarm.close()
        again = await open_hub(kept_versions=1)
    assert "is being served" in caplog.text
    artefacts = hub.run_dir / "artefacts"
    assert (artefacts / "tiny-run-v000003.manifest.json").exists()
    assert again.publisher.offer(4)
    await again.swarm.close()
    last = await open_hub(kept_versions=1)
    assert {path.name.partition(".")[0] for path in artefacts.iterdir()} == {"tiny-run-v000004"}
    assert last.publisher.offer(4)


async def test_only_the_newest_versions_are_kept_in_the_swarm(open_hub, make_adapter, model_dir) -> None:
    hub = await open_hub(kept_versions=2)
    base = await hub.publisher.publish_base(model_dir)
    offers = [await hub.publisher.publish_policy(version, make_adapter(version)) for version in (1, 2, 3, 4)]
    hashes = [bytes.fromhex(open_offer(offer, hub.identity.public_key).info_hash) for offer in (base, *offers)]
    assert set(await hub.swarm.stats()) == {hashes[0], hashes[3], hashes[4]}
    with pytest.raises(SwarmError, match="published: 0, 3, 4"):
        hub.publisher.offer(2)
    assert hub.publisher.file("tiny-run-v000002", "adapter_config.json") is None
    kept = {path.name for path in (hub.run_dir / "artefacts").iterdir()}
    assert {name.partition(".")[0] for name in kept} == {"tiny-run-base", "tiny-run-v000003", "tiny-run-v000004"}
    await hub.swarm.close()

    again = await open_hub(kept_versions=2)
    assert set(await again.swarm.stats()) == {hashes[0], hashes[3], hashes[4]}
    assert {path.name for path in (again.run_dir / "artefacts").iterdir()} == kept

    await again.swarm.close()
    fewer = await open_hub(kept_versions=1)
    assert set(await fewer.swarm.stats()) == {hashes[0], hashes[4]}
    assert not (fewer.run_dir / "artefacts" / "tiny-run-v000003").exists()


async def test_the_version_that_is_evaluated_stays_however_old_it_is(open_hub, make_adapter) -> None:
    hub = await open_hub(kept_versions=2)
    publish = hub.publisher.publish_policy
    adapters = {version: make_adapter(version) for version in range(1, 7)}
    for version in (1, 2, 3, 4):
        await publish(version, adapters[version])
    hub.publisher.keep(1)
    both = await asyncio.gather(publish(1, adapters[1]), publish(1, adapters[1]))
    assert both[0] == both[1]
    await publish(5, adapters[5])
    assert [version for version in range(6) if hub.publisher.has(version)] == [1, 4, 5]
    hub.publisher.keep(4)
    await publish(6, adapters[6])
    assert [version for version in range(7) if hub.publisher.has(version)] == [4, 5, 6]


async def test_a_hub_without_libtorrent_offers_its_web_seed(make_adapter, tmp_path, hub, open_swarm) -> None:
    from echo_shared.swarm import SwarmSettings
    from echo_shared.swarm.web_seed import WebSeedSwarm

    swarm = WebSeedSwarm(SwarmSettings())
    publisher = Publisher(
        tmp_path / "other", "r", hub.identity, swarm=swarm, tracker=hub.tracker, memory=HostMemory(enabled=False)
    )
    await publisher.reopen()
    await publisher.publish_policy(1, make_adapter(1))
    assert publisher.offer_for(1, node_ip="127.0.0.1", hub_host="localhost").peers == ()
