"""Information about a node before any hub has admitted it; the daemon's tests have later states."""

import asyncio
import os

import pytest

from echo_node.about import About
from echo_node.backends.registry import BackendChoice
from echo_node.engine.choosing import EngineChooser
from echo_node.host import hardware
from echo_node.host.address import HubAddress
from echo_node.host.hubs import Joining
from echo_node.net.client import Introduction
from echo_shared.signing.identity import Identity

ME = Identity.generate()
FOUND = hardware.detect()
GPU = BackendChoice(name="torch", device="cuda", reason="this machine has a CUDA GPU")
CPU = BackendChoice(name="llama_cpp", device="cpu", reason="this machine has no better device")


@pytest.fixture
async def about() -> About:
    """Return this for a node that would use the GPU first, then the CPU."""
    left = [GPU, CPU]

    chooser = EngineChooser(lambda: (FOUND, left.pop(0)), changed=asyncio.Event())
    await chooser.decide()
    address = HubAddress.parse("http://127.0.0.1:8710", insecure=False)
    joining = Joining(address=address, pinned=None, invite_token="let me in", patient=False)
    return About(me=ME, name="a node", joining=joining, chooser=chooser)


async def test_the_introduction_names_the_engine_of_the_moment(about: About) -> None:
    first = Introduction(
        name="a node", invite_token="let me in", backend="torch", device=FOUND.summary, swarm_port=1, mesh_port=2
    )
    assert about.introduction(swarm_port=1, mesh_port=2) == first
    await about.chooser.decide()
    assert about.introduction(swarm_port=1, mesh_port=2).backend == "llama_cpp"


async def test_a_node_that_is_not_admitted_yet_is_connecting(about: About) -> None:
    shown = about.snapshot(None, (), (), connected=False, now=0.0)
    assert (shown.pid, shown.node_id, shown.name) == (os.getpid(), ME.node_id, "a node")
    assert (shown.backend, shown.device, shown.hub) == ("torch", "cuda", "http://127.0.0.1:8710")
    assert (shown.connected, shown.activity, shown.run_name) == (False, "connecting", "")
