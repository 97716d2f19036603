"""A node's introduction before any hub has admitted it; the daemon's tests cover later states."""

import asyncio
import os
from typing import Any

import pytest

from echo_node.about import About, amount, arrival
from echo_node.backends.registry import BackendChoice
from echo_node.config import NodeConfig
from echo_node.engine.choosing import EngineChoosers
from echo_node.host import hardware
from echo_node.host.address import HubAddress
from echo_node.host.hardware import Hardware
from echo_node.host.hubs import Joining
from echo_node.net.client import Introduction
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import Fetched

ME = Identity.generate()
FOUND = hardware.detect()
GPU = BackendChoice(name="torch", device="cuda", reason="this machine has a CUDA GPU")
CPU = BackendChoice(name="llama_cpp", device="cpu", reason="this machine has no better device")


@pytest.fixture
async def about() -> About:
    """Return the description of a node that uses the GPU at first, then the CPU."""
    left = [GPU, CPU]

    class Machine:
        def find_devices(self) -> tuple[str, ...]:
            return ("",)

        def look(self, name: str) -> tuple[Hardware, BackendChoice]:
            assert name == ""
            return FOUND, left.pop(0)

    chooser = EngineChoosers(Machine(), changed=asyncio.Event())
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


@pytest.mark.parametrize(
    ("came", "words"),
    [
        ({"pushed_bytes": 12_300}, "inline, 12.3 kB in 1.5 s"),
        (
            {"pushed_bytes": 1_000_000, "mesh_bytes": 3_000_000},
            "broadcast, 4.0 MB in 1.5 s, 75 % of it from other nodes",
        ),
        ({"swarm_bytes": 5, "web_seed_bytes": 3, "pushed_bytes": 4}, "swarm, 12 bytes in 1.5 s"),
        ({"web_seed_bytes": 2_500_000_000}, "web seed, 2.5 GB in 1.5 s"),
        ({"shared_memory_bytes": 9}, "through the host's shared memory, 9 bytes in 1.5 s"),
        ({"model_hub_bytes": 9}, "from a model hub, 9 bytes in 1.5 s"),
        ({}, "was already here"),
    ],
)
def test_the_way_that_brought_most_is_named(came: dict[str, Any], words: str) -> None:
    none = {"swarm_bytes": 0, "web_seed_bytes": 0}
    assert arrival(Fetched(info_hash=bytes(20), policy_version=1, seconds=1.5, **(none | came))) == words


def test_amounts_have_a_suitable_unit() -> None:
    assert [amount(n) for n in (0, 999, 1_000, 10**9)] == ["0 bytes", "999 bytes", "1.0 kB", "1.0 GB"]


async def test_the_hub_learns_which_tenants_the_owner_refuses(about: About) -> None:
    config = NodeConfig(answers=False, refused_tenants=("Ada", "Bob"))
    told = about.with_settings(config).introduction(swarm_port=1, mesh_port=2)
    assert (told.answers, told.refuses) == (False, ("Ada", "Bob"))
    assert about.with_settings(config).willing.refuses_work_of("Ada")
