"""A scripted hub, and nodes whose engines are scripted."""

import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from echo_node.backends import process
from echo_node.host import devices
from echo_node.host.devices import Device
from echo_node.host.hardware import Gpu, Hardware
from echo_shared.errors import BackendError
from echo_shared.wire.messages import Lease, rollout_id
from tests.driven_hub import DrivenHub as Hub
from tests.driven_hub import make_lease, write_adapter

__all__ = ["Hub", "make_lease", "write_adapter"]


def ids_of(lease: Lease) -> set[str]:
    return {rollout_id(lease.lease_id, index) for index in lease.indices}


@pytest.fixture
def odd_worker(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make nodes start `odd_worker` in place of their engine's process."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(process, "WORKER", "tests.echo_node.odd_worker")
    return process.WORKER


@pytest.fixture(scope="session")
def _compiled_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    directory = tmp_path_factory.mktemp("stub-cuda")
    source = Path(__file__).with_name("stub_cuda.c")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(directory / "libcuda.so.1"), str(source)]
    subprocess.run([*command, "-lpthread"], check=True, timeout=60)
    return directory


@pytest.fixture
def stub_cuda(_compiled_stub: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a stub of NVIDIA's driver, which processes started by the test load."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(_compiled_stub))
    return _compiled_stub


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Path]:
    """Yield a local socket that a program listens on, like NVIDIA's Multi-Process Service."""
    path = tmp_path / "service"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        yield path


@pytest.fixture
async def bare_hub(tmp_path: Path) -> AsyncIterator[Hub]:
    """Yield a listening hub without a base model or a version."""
    hub = Hub(tmp_path / "hub")
    await hub.open()
    yield hub
    await hub.end()


@pytest.fixture
async def hub(bare_hub: Hub) -> Hub:
    await bare_hub.publish_base()
    return bare_hub


FAKE_GPUS = {
    name: Gpu(name="Fake 4090", memory_bytes=2**34, uuid=f"GPU-{number}")
    for number, name in enumerate(("cuda:0", "cuda:1"))
}


@pytest.fixture
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Gpu]:
    """Make the detection of devices find two CUDA devices, whose engines in truth run on the processor. Return them by
    name; a test may remove one.
    """
    gpus = dict(FAKE_GPUS)

    def find(name: str, hardware: Hardware, variables: Mapping[str, str]) -> Device:
        if name not in gpus:
            raise BackendError(f"The device {name} is not here.", code=devices.NOT_HERE)
        environment = {"CUDA_VISIBLE_DEVICES": gpus[name].uuid}
        return Device(name=name, api="cpu", title=gpus[name].name, environment=environment, gpu=gpus[name])

    monkeypatch.setattr(devices, "find", find)
    return gpus
