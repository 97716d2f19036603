from pathlib import Path

import pytest

from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import NodePaths
from echo_shared.errors import StorageError


def record(url: str, key: int, joined_at: float, run_id: str = "run") -> HubRecord:
    return HubRecord(url=url, hub_key_hex=(bytes([key]) * 32).hex(), joined_at=joined_at, run_id=run_id)


@pytest.fixture
def paths(tmp_path: Path) -> NodePaths:
    return NodePaths.find(tmp_path)


def test_hubs_are_found_by_address_and_by_the_last_join(paths: NodePaths) -> None:
    hubs = Hubs(paths)
    assert hubs.last() is None and hubs.at("http://a") is None
    hubs.save(record("http://a", 1, 20.0))
    hubs.save(record("http://b", 2, 10.0))
    assert hubs.at("http://b") == record("http://b", 2, 10.0)
    assert hubs.last() == record("http://a", 1, 20.0)


def test_a_new_key_at_an_address_takes_its_place(paths: NodePaths) -> None:
    hubs = Hubs(paths)
    hubs.save(record("http://a", 1, 1.0))
    hubs.save(record("http://a", 2, 2.0))
    assert hubs.all() == [record("http://a", 2, 2.0)]


def make_files(paths: NodePaths, run_id: str) -> list[Path]:
    made = [
        paths.artefacts / f"{run_id}-base" / "model.safetensors",
        paths.artefacts / f"{run_id}-base.verified",
        paths.artefacts / f"{run_id}-v000012" / "adapter_model.safetensors",
        paths.artefacts / f"{run_id}-v000012.verified",
        paths.carriers / f"{run_id}-base.s" / "config.json.sealed",
        paths.carriers / f"{run_id}-v000012.k" / "payload.sealed",
        paths.carriers / f"{run_id}-v000012.d11" / "payload.sealed",
        paths.derived / f"{run_id}-base" / ("0f" * 16) / "model.gguf",
    ]
    for path in made:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return made


def test_forgetting_a_hub_deletes_only_its_files(paths: NodePaths) -> None:
    hubs = Hubs(paths)
    hubs.save(record("http://a", 1, 1.0, "one"))
    hubs.save(record("http://b", 2, 2.0, "one-v1"))
    gone, kept = make_files(paths, "one"), make_files(paths, "one-v1")
    hubs.forget(record("http://a", 1, 1.0, "one"))
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)
    assert hubs.all() == [record("http://b", 2, 2.0, "one-v1")]


def test_another_run_of_the_same_hub_takes_the_place_of_the_first(paths: NodePaths) -> None:
    hubs = Hubs(paths)
    hubs.save(record("http://a", 1, 1.0, "one"))
    gone = make_files(paths, "one")
    hubs.save(record("http://a", 1, 2.0, "two"))
    assert not any(path.exists() for path in gone)


@pytest.mark.parametrize("text", ["", "{}", '{"url": "http://a", "hub_key_hex": "zz", "joined_at": 1}', "\x00"])
def test_a_damaged_record_is_an_error_that_names_the_file(paths: NodePaths, text: str) -> None:
    file = paths.hubs / "x" / "hub.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(StorageError, match=r"hub\.json"):
        Hubs(paths).all()
