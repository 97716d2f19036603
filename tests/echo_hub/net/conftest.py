"""A hub's publisher, tracker and web seed (HTTP server of files) on loopback, and swarm clients of nodes."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save_file

from echo_hub.net import artefact_routes, publisher, tracker
from echo_hub.net.host_memory import HostMemory
from echo_hub.net.publisher import Publisher
from echo_hub.net.tracker import Tracker
from echo_shared import delta
from echo_shared.artefacts.hashed_files import verify_files
from echo_shared.artefacts.manifest import PAYLOAD_NAME, SEALED_SUFFIX, Manifest, open_offer
from echo_shared.artefacts.sealing import unseal
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity
from echo_shared.swarm import Swarm, SwarmSettings, opening
from echo_shared.wire.messages import ArtefactOffer, Way

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

    def offer(self, version: int, *, node_number: int = 1, keyframe: bool = False) -> ArtefactOffer:
        return self.publisher.offer_for(
            version,
            node_id=f"{node_number:020x}",
            node_ip="127.0.0.1",
            hub_host="localhost",
            way=Way.SWARM,
            keyframe=keyframe,
        )

    def manifest(self, version: int, *, keyframe: bool = False) -> Manifest:
        return open_offer(self.offer(version, keyframe=keyframe), self.identity.public_key)

    def read(self, manifest: Manifest, carrier: Path, target: Path, *, parent: Path | None = None) -> None:
        """Read a carrier (encrypted package) as a member of the run; fail unless it has exactly the signed files."""
        (key,) = (known.key for known in self.publisher.run_keys() if known.key_id == manifest.key_id)
        if manifest.in_files:
            for file in manifest.files:
                unseal(carrier / (file.path + SEALED_SUFFIX), target / file.path, key)
        else:
            payload = target.with_name(f"{target.name}.payload")
            unseal(carrier / PAYLOAD_NAME, payload, key)
            files = {file.path: file.size_bytes for file in manifest.files}
            with payload.open("rb") as stream:
                delta.decode(stream, target, files=files, parent=parent)
        verify_files(manifest, target)


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[[int], Path]:
    """Return a function that writes a version's files as the learner does; successive versions differ a little."""

    def write(version: int) -> Path:
        directory = tmp_path / "learner" / str(version)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "adapter_config.json").write_text(json.dumps({"r": 16, "lora_alpha": 32}))
        start, moved = (np.random.default_rng(seed).standard_normal((500, 500), np.float32) for seed in (0, version))
        save_file({"lora": start + np.float32(1e-5) * moved}, directory / "adapter_model.safetensors")
        (directory / "optimizer.pt").write_bytes(b"not for the nodes")
        return directory

    return write


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Return the directory of a base model, which also holds files that nodes do not need."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (directory / name).write_bytes(name.encode() * 1_000)
    for name in ("README.md", "pytorch_model.bin", "training_args.bin"):
        (directory / name).write_bytes(b"not needed")
    return directory


@pytest.fixture
async def open_swarm() -> AsyncIterator[SwarmOpener]:
    swarms: list[Swarm] = []

    async def opener(**settings: object) -> Swarm:
        swarm = await opening.open_swarm(SwarmSettings.model_validate({"listen_host": "127.0.0.1", **settings}))
        swarms.append(swarm)
        return swarm

    yield opener
    for swarm in swarms:
        await swarm.close()


@pytest.fixture
async def open_hub(
    open_swarm: SwarmOpener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[], Awaitable[Hub]]]:
    """Return a function that opens the hub of one run directory; a second call restarts it."""
    runners: list[web.AppRunner] = []
    memories: list[HostMemory] = []

    async def opener(*, kept_versions: int = 8) -> Hub:
        monkeypatch.setattr(publisher, "KEPT_VERSIONS", kept_versions)
        memories.append(HostMemory(enabled=True))
        run_dir = tmp_path / "run"
        identity = key_file.load_or_create(run_dir / "hub.key")
        swarm, trk = await open_swarm(), Tracker(identity)
        published = Publisher(run_dir, "tiny run", identity, swarm=swarm, tracker=trk, memory=memories[-1])
        await published.reopen()
        app = web.Application()
        app.router.add_routes(tracker.routes(trk))
        app.router.add_routes(artefact_routes.routes(published, trk))
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
