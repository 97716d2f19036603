"""A hub that a test drives, and nodes' engines that are odd."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.driven_hub import DrivenHub as Hub
from benchmarks.driven_hub import make_lease, write_adapter
from echo_node.backends import process
from echo_shared.messages import Lease, rollout_id

__all__ = ["Hub", "make_lease", "write_adapter"]


def ids_of(lease: Lease) -> set[str]:
    return {rollout_id(lease.lease_id, index) for index in lease.indices}


@pytest.fixture
def odd_worker(monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines' processes are `odd_worker`s."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(process, "WORKER", "tests.echo_node.odd_worker")
    return process.WORKER


@pytest.fixture
async def bare_hub(tmp_path: Path) -> AsyncIterator[Hub]:
    """Listens; has nothing published."""
    hub = Hub(tmp_path / "hub")
    await hub.open()
    yield hub
    await hub.end()


@pytest.fixture
async def hub(bare_hub: Hub) -> Hub:
    """Has a base model."""
    await bare_hub.publish_base()
    return bare_hub
