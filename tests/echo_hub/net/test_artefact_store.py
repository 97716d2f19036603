"""Carriers (encrypted packages of model files) on a real disk: making them, repairing them, and removing leftovers."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest

from echo_hub.net.artefact_store import ArtefactStore, Carrier
from echo_shared.artefacts.hashed_files import verify_files
from echo_shared.artefacts.manifest import PAYLOAD_NAME, SEALED_SUFFIX
from echo_shared.artefacts.sealing import unseal
from echo_shared.delta import decode
from echo_shared.errors import CodecError, ConfigError, StorageError, SwarmError
from echo_shared.swarm import make_torrent
from echo_shared.wire.messages import RunKey

KEY = RunKey(key_id=3, key=bytes(range(32)))


@pytest.fixture
def store(tmp_path: Path) -> ArtefactStore:
    return ArtefactStore(tmp_path / "artefacts", "tiny run")


@pytest.fixture
def made(store: ArtefactStore, model_dir: Path, make_adapter) -> dict[str, Carrier]:
    base = store.make_base(model_dir, KEY, source=None)
    one = store.make_policy(1, make_adapter(1), KEY, parent=None)
    two = store.make_policy(2, make_adapter(2), KEY, parent=one.manifest)
    return {"base": base, "1": one, "2": two, "2k": store.make_keyframe(two.manifest, make_adapter(2), KEY)}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_base_holds_exactly_the_files_for_loading(store, model_dir, tmp_path) -> None:
    carrier = store.make_base(model_dir, KEY, source=None)
    assert (carrier.manifest.carrier, carrier.manifest.key_id) == ("files", 3)
    paths = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(file.path for file in carrier.manifest.files) == paths
    assert names(carrier.directory) == {path + SEALED_SUFFIX for path in paths}
    for path in paths:
        unseal(carrier.directory / (path + SEALED_SUFFIX), tmp_path / "read" / path, KEY.key)
    verify_files(carrier.manifest, tmp_path / "read")
    assert make_torrent(carrier.directory).info_hash == carrier.info_hash
    assert carrier.total_bytes == sum(path.stat().st_size for path in carrier.directory.iterdir())


def test_a_base_in_shards_follows_its_index(store, model_dir) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (model_dir / name).write_bytes(name.encode() * 10)
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    files = store.make_base(model_dir, KEY, source=None).manifest.files
    weights = {file.path for file in files if "safetensors" in file.path}
    assert weights == {"model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"}


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_base_is_a_config_error(store, model_dir, missing) -> None:
    (model_dir / missing).unlink()
    with pytest.raises(ConfigError, match="incomplete") as caught:
        store.make_base(model_dir, KEY, source=None)
    assert missing in str(caught.value)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[]"])
def test_a_broken_index_is_a_config_error(store, model_dir, index) -> None:
    (model_dir / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match="index"):
        store.make_base(model_dir, KEY, source=None)


def test_a_missing_adapter_is_a_storage_error_and_leaves_nothing(store, tmp_path) -> None:
    with pytest.raises(StorageError, match="cannot be published"):
        store.make_policy(1, tmp_path / "nowhere", KEY, parent=None)
    assert names(tmp_path / "artefacts") == set()


def test_a_delta_is_read_with_its_parent_and_with_no_other(store, made, make_adapter, tmp_path) -> None:
    two = made["2"]
    assert (two.directory.name, names(two.directory)) == ("tiny-run-v000002.d1", {PAYLOAD_NAME})
    unseal(two.directory / PAYLOAD_NAME, tmp_path / "payload", KEY.key)
    files = {file.path: file.size_bytes for file in two.manifest.files}
    payload = io.BytesIO((tmp_path / "payload").read_bytes())
    decode(payload, tmp_path / "read", files=files, parent=store.files_of(made["1"].manifest))
    payload.seek(0)
    verify_files(two.manifest, tmp_path / "read")
    with pytest.raises((CodecError, SwarmError)):
        decode(payload, tmp_path / "wrong", files=files, parent=make_adapter(9))
        verify_files(two.manifest, tmp_path / "wrong")
    assert two.manifest.content == made["2k"].manifest.content


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_keyframe_of_damaged_files_is_made_of_the_learners(store, made, make_adapter, damage, caplog) -> None:
    files, manifest = store.files_of(made["2"].manifest), made["2"].manifest
    shutil.rmtree(files) if damage == "gone" else (files / "adapter_config.json").write_text("{}")
    keyframe = store.make_keyframe(manifest, make_adapter(2), KEY)
    assert "damaged" in caplog.text
    assert keyframe.manifest.content == manifest.content
    verify_files(manifest, files)


def test_no_keyframe_is_made_of_another_version(store, made, make_adapter, tmp_path) -> None:
    manifest = made["2"].manifest
    (store.files_of(manifest) / "adapter_config.json").write_text("{}")
    with pytest.raises(SwarmError):
        store.make_keyframe(manifest, make_adapter(3), KEY)
    with pytest.raises(StorageError, match="cannot be published"):
        store.make_keyframe(manifest, tmp_path / "nowhere", KEY)


def test_a_carrier_is_on_the_disk_before_its_manifest_is(store, make_adapter, monkeypatch) -> None:
    synced: list[str] = []

    def noted(descriptor: int, sync=os.fsync) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not say which file a descriptor is of")
    monkeypatch.setattr(os, "fsync", noted)
    store.make_policy(1, make_adapter(1), KEY, parent=None)
    *content, torrent, manifest = synced
    assert content == ["adapter_config.json", "adapter_model.safetensors", "payload.sealed.tmp"]
    assert ".torrent." in torrent and ".manifest.json." in manifest


def test_all_that_is_whole_is_found_again(store, made, tmp_path) -> None:
    before = names(tmp_path / "artefacts")
    assert store.read_all({3}) == [made["base"], made["1"], made["2"], made["2k"]]
    assert names(tmp_path / "artefacts") == before


def test_another_source_changes_the_manifest_alone(store, made) -> None:
    base = store.say_source(made["base"], f"owner/name@{'0a' * 20}")
    assert base.info_hash == made["base"].info_hash
    assert store.read_all({3})[0] == base


@pytest.mark.parametrize("damage", ["files", "a file", "payload", "a byte less", "torrent", "other torrent", "the key"])
def test_a_damaged_carrier_is_removed_and_can_be_made_again(store, made, make_adapter, damage, caplog) -> None:
    directory, files = made["1"].directory, store.files_of(made["1"].manifest)
    torrent = directory.with_name(f"{directory.name}.torrent")
    match damage:
        case "files":
            shutil.rmtree(files)
        case "a file":
            (files / "adapter_config.json").write_text("{")
        case "payload":
            (directory / PAYLOAD_NAME).unlink()
        case "a byte less":
            (directory / PAYLOAD_NAME).write_bytes((directory / PAYLOAD_NAME).read_bytes()[:-1])
        case "torrent":
            torrent.unlink()
        case "other torrent":
            shutil.copy(made["2"].directory.with_name("tiny-run-v000002.d1.torrent"), torrent)
        case "the key":
            assert store.read_all({4}) == []
    kept = [] if damage == "the key" else [made["base"], made["2"], made["2k"]]
    assert store.read_all({3}) == kept
    assert "tiny-run-v000001.k" in caplog.text
    assert not list(directory.parent.glob("tiny-run-v000001*"))
    again = store.make_policy(1, make_adapter(1), KEY, parent=None)
    assert again.manifest.content == made["1"].manifest.content
    assert again in store.read_all({3})


@pytest.mark.parametrize("stopped_after", ["copying", "encoding", "sealing", "torrent", "manifest in part"])
def test_half_made_carriers_are_removed(store, make_adapter, tmp_path, stopped_after) -> None:
    carrier = store.make_policy(1, make_adapter(1), KEY, parent=None)
    manifest, torrent = (
        carrier.directory.with_name(carrier.directory.name + suffix) for suffix in (".manifest.json", ".torrent")
    )
    match stopped_after:
        case "manifest in part":
            manifest.write_bytes(manifest.read_bytes()[:-10])
        case "torrent":
            manifest.unlink()
        case "sealing":
            manifest.unlink(), torrent.unlink()
        case "copying" | "encoding":
            manifest.unlink(), torrent.unlink(), shutil.rmtree(carrier.directory)
    if stopped_after == "encoding":
        work = tmp_path / "artefacts" / "tiny-run-v000001.tmp"
        work.mkdir()
        (work / "keyframe").write_bytes(b"half")
    (tmp_path / "artefacts" / "the owner's notes").touch()
    assert store.read_all({3}) == []
    assert names(tmp_path / "artefacts") == {"the owner's notes"}


def test_a_version_made_again_replaces_all_old_files(store, made, make_adapter, tmp_path) -> None:
    store.make_policy(2, make_adapter(2), KEY, parent=None)
    assert {name for name in names(tmp_path / "artefacts") if name.startswith("tiny-run-v000002")} == {
        "tiny-run-v000002",
        "tiny-run-v000002.k",
        "tiny-run-v000002.k.torrent",
        "tiny-run-v000002.k.manifest.json",
    }


def test_files_that_cannot_be_deleted_are_removed_later(store, made, monkeypatch, caplog, tmp_path) -> None:
    def busy(path: Path, *, ignore_errors: bool = False, missing_ok: bool = False) -> None:
        raise PermissionError(f"{path} is being served")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        store.delete([made["2"], made["2k"]])
    assert "is being served" in caplog.text
    assert (tmp_path / "artefacts" / "tiny-run-v000002.k").exists()
    assert store.read_all({3}) == [made["base"], made["1"]]
    assert not list((tmp_path / "artefacts").glob("tiny-run-v000002*"))


def test_leftovers_that_cannot_be_removed_raise_a_storage_error(store, made, make_adapter, monkeypatch) -> None:
    def busy(path: Path) -> None:
        raise PermissionError(f"{path} is being served")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        with pytest.raises(StorageError, match="tiny-run-v000002 cannot be published") as caught:
            store.make_policy(2, make_adapter(2), KEY, parent=None)
    assert "is being served" in str(caught.value)
