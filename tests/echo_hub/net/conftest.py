"""A hub's publisher, tracker and web seed on loopback, and nodes' swarm clients."""

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from echo_hub.net import artefact_routes, publisher, tracker
from echo_hub.net.host_memory import HostMemory
from echo_hub.net.publisher import Publisher
from echo_hub.net.tracker import Tracker
from echo_shared.identity import Identity
from echo_shared.swarm import Swarm, SwarmSettings

SwarmOpener = Callable[..., Awaitable[Swarm]]


@dataclass
class Hub:
    run_dir: Path
    identity: Identity
    swarm: Swarm
    tracker: Tracker
    publisher: Publisher
    url: str

    def announce_url(self, node_number: int) -> str:
        return f"{self.url}/announce/{self.tracker.passkey(f'{node_number:020x}')}"


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[[int], Path]:
    """What the learner leaves for this version."""

    def write(version: int) -> Path:
        directory = tmp_path / "learner" / str(version)
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text(json.dumps({"r": 16, "lora_alpha": 32}))
        (directory / "adapter_model.safetensors").write_bytes(random.Random(version).randbytes(1_000_000))
        (directory / "optimizer.pt").write_bytes(b"not for the nodes")
        return directory

    return write


@pytest.fixture
async def open_swarm() -> AsyncIterator[SwarmOpener]:
    swarms: list[Swarm] = []

    async def opener(**settings: object) -> Swarm:
        swarm = await Swarm.open(SwarmSettings.model_validate({"listen_host": "127.0.0.1", **settings}))
        swarms.append(swarm)
        return swarm

    yield opener
    for swarm in swarms:
        await swarm.close()


@pytest.fixture
async def open_hub(
    open_swarm: SwarmOpener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[], Awaitable[Hub]]]:
    """Opens the hub of one run directory; again, for a restart."""
    runners: list[web.AppRunner] = []
    memories: list[HostMemory] = []

    async def opener(*, kept_versions: int = 8) -> Hub:
        monkeypatch.setattr(publisher, "KEPT_VERSIONS", kept_versions)
        memories.append(HostMemory(enabled=True))
        run_dir = tmp_path / "run"
        identity = Identity.load_or_create(run_dir / "hub.key")
        swarm, trk = await open_swarm(), Tracker(identity)
        published = Publisher(run_dir, "tiny run", identity, swarm=swarm, tracker=trk, memory=memories[-1])
        await published.reopen()
        app = web.Application()
        app.router.add_routes(tracker.routes(trk))
        app.router.add_routes(artefact_routes.routes(published))
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return Hub(run_dir, identity, swarm, trk, published, url)

    yield opener
    for runner in runners:
        await runner.cleanup()
    for memory in memories:
        memory.close()


@pytest.fixture
async def hub(open_hub: Callable[[], Awaitable[Hub]]) -> Hub:
    return await open_hub()
