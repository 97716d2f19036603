"""The hub keeps the newest policy versions in shared memory, and tells only nodes on its own host where."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_hub.net.host_memory import HostMemory, _is_own_address
from echo_shared.artefacts.hashed_files import describe_files
from echo_shared.artefacts.manifest import Manifest
from echo_shared.swarm import shared_memory
from echo_shared.wire.messages import SharedMemory

pytestmark = pytest.mark.skipif(not shared_memory.AVAILABLE, reason="this system or Python has no such memory")

HERE = "127.0.0.1"


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory(enabled=True)
    yield memory
    memory.close()


async def hold(memory: HostMemory, version: int, directory: Path) -> Manifest:
    manifest = write(version, directory)
    await memory.hold(manifest, directory)
    return manifest


def write(version: int, directory: Path) -> Manifest:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(str(version))
    return Manifest(
        kind="policy",
        run_id="r",
        name="r",
        policy_version=version,
        carrier="keyframe",
        key_id=0,
        info_hash="ab" * 20,
        files=describe_files(directory),
    )


def content(address: SharedMemory | None, manifest: Manifest, directory: Path) -> str:
    assert address is not None
    shared_memory.read(address, manifest, directory)
    return (directory / "adapter_config.json").read_text()


async def test_a_node_here_is_told_where_the_newest_versions_are(memory: HostMemory, tmp_path: Path) -> None:
    await hold(memory, 1, tmp_path / "hub")
    assert memory.address(1, node_ip=HERE) is None, "no node was there to read it"
    manifests = {version: await hold(memory, version, tmp_path / "hub") for version in (2, 3)}
    second = memory.address(2, node_ip=HERE)
    for version, manifest in manifests.items():
        assert content(memory.address(version, node_ip=HERE), manifest, tmp_path) == str(version)
    await hold(memory, 4, tmp_path / "hub")
    assert memory.address(2, node_ip=HERE) is None
    assert second is not None
    with pytest.raises(OSError):
        shared_memory.read(second, manifests[2], tmp_path)


@pytest.mark.parametrize("ip", ["127.0.0.1", "127.8.8.8", "::1"])
async def test_own_addresses(memory: HostMemory, tmp_path: Path, ip: str) -> None:
    memory.address(0, node_ip=ip)
    await hold(memory, 1, tmp_path / "hub")
    assert memory.address(1, node_ip=ip) is not None


@pytest.mark.parametrize("ip", ["192.0.2.1", "203.0.113.9", "2001:db8::1"])
async def test_nodes_elsewhere_are_told_nothing_and_take_no_memory(memory: HostMemory, tmp_path: Path, ip: str) -> None:
    memory.address(0, node_ip=ip)
    await hold(memory, 1, tmp_path / "hub")
    assert memory.address(1, node_ip=HERE) is None
    await hold(memory, 2, tmp_path / "hub")
    assert memory.address(2, node_ip=ip) is None
    assert memory.address(2, node_ip=HERE) is not None


async def test_disabled_host_memory_does_nothing(tmp_path: Path) -> None:
    memory = HostMemory(enabled=False)
    memory.address(0, node_ip=HERE)
    await hold(memory, 1, tmp_path / "hub")
    assert memory.address(1, node_ip=HERE) is None


async def test_at_the_end_nothing_is_held(memory: HostMemory, tmp_path: Path) -> None:
    memory.address(0, node_ip=HERE)
    manifest = await hold(memory, 1, tmp_path / "hub")
    address = memory.address(1, node_ip=HERE)
    memory.close()
    assert address is not None
    with pytest.raises(OSError):
        shared_memory.read(address, manifest, tmp_path)


async def test_a_version_that_memory_cannot_hold_goes_by_the_swarm(
    memory: HostMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory.address(0, node_ip=HERE)
    manifest = await hold(memory, 1, tmp_path / "hub")
    await memory.hold(manifest.model_copy(update={"policy_version": 2}), tmp_path / "nowhere")
    assert memory.address(2, node_ip=HERE) is None
    assert "Policy version 2 is not held in memory" in caplog.text
    assert memory.address(1, node_ip=HERE) is not None


async def test_an_address_is_looked_at_once(memory: HostMemory) -> None:
    memory.address(0, node_ip="192.0.2.77")
    before = _is_own_address.cache_info()
    memory.address(0, node_ip="192.0.2.77")
    after = _is_own_address.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)
