"""BitTorrent clients of other projects, behind home routers, fetch an encrypted artefact from a hub and from a node
whose router has opened its port.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dissemination.links import HUB
from benchmarks.dissemination.wan import homes, routers
from benchmarks.dissemination.wan.emulator import Home
from benchmarks.dissemination.wan.homes import Wan, WanSet, open_wan
from benchmarks.dissemination.wan.routers import Router
from echo_shared.artefacts.sealing import new_key, seal, unseal
from echo_shared.swarm import bencode, make_torrent

pytestmark = pytest.mark.skipif(
    not homes.can_emulate() or bool(routers.lacking()), reason="routers take root, TUN devices, nftables and miniupnpd"
)
PAYLOAD_BYTES = 2_000_000
SLOW_BYTES_S = 200_000
QUICK = Home(up=50, down=50, delay_ms=5)
NODE, CLIENT = 1, 2
HUB_SIDE = """
import asyncio, json, sys
from pathlib import Path
from aiohttp import web
from echo_hub.net.tracker import Tracker, routes
from echo_shared.signing.identity import Identity
from echo_shared.swarm import SwarmSettings, open_swarm
from echo_shared.swarm.torrent import read_torrent

async def main():
    about = json.loads(sys.argv[1])
    torrent = Path(about["torrent"]).read_bytes()
    swarm = await open_swarm(SwarmSettings(upload_limit_bytes_s=about["upload_limit_bytes_s"]))
    await swarm.seed(torrent, Path(about["artefact"]))
    tracker = Tracker(Identity.generate())
    tracker.register_self(read_torrent(torrent).info_hash, swarm.port)
    application = web.Application()
    application.add_routes(routes(tracker))
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 8710).start()
    print(json.dumps([f"/announce/{tracker.passkey(20 * str(number))}" for number in range(3)]), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    (stats,) = (await swarm.stats()).values()
    print(stats.uploaded_bytes, flush=True)
    await swarm.close()
    await runner.cleanup()

asyncio.run(main())
"""
NODE_SIDE = """
import asyncio, json, sys
from pathlib import Path
from echo_shared.swarm import SwarmSettings, open_swarm

async def main():
    about = json.loads(sys.argv[1])
    limit = about["upload_limit_bytes_s"]
    swarm = await open_swarm(SwarmSettings(router_ports=True, upload_limit_bytes_s=limit))
    async with asyncio.timeout(20):
        await swarm.router.changed.wait()
    await swarm.seed(Path(about["torrent"]).read_bytes(), Path(about["artefact"]), [about["tracker"]])
    await asyncio.sleep(1)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    (stats,) = (await swarm.stats()).values()
    print(stats.uploaded_bytes, flush=True)
    await swarm.close()

asyncio.run(main())
"""


@contextmanager
def running(wan: Wan, host: int, code: str, about: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the Python program `code` on a host during the block. Yield its process, and the first line of its output."""
    command = [*wan.command(host), sys.executable, "-c", code, json.dumps(about)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


def fetch(command: list[str], file: Path, content: bytes) -> None:
    """Run a client until its file is complete."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            ends_at = time.monotonic() + 60
            while not file.exists() or file.read_bytes() != content:
                assert time.monotonic() < ends_at, "the client fetches"
                time.sleep(0.1)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("program", "kind"), [("aria2c", "symmetric"), pytest.param("transmission-cli", "cone", marks=pytest.mark.slow)]
)
def test_a_foreign_client_fetches_from_node_and_hub(program: str, kind: Router, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program}, an independent client, is not installed")
    artefact, target = tmp_path / "from" / "artefact", tmp_path / "to"
    artefact.mkdir(parents=True)
    target.mkdir()
    key, plain, sealed = new_key(), os.urandom(PAYLOAD_BYTES), artefact / "payload.sealed"
    (tmp_path / "plain").write_bytes(plain)
    seal(tmp_path / "plain", sealed, key)
    torrent = tmp_path / "torrent"
    torrent.write_bytes(make_torrent(artefact).torrent)
    about = {"torrent": str(torrent), "artefact": str(artefact), "upload_limit_bytes_s": SLOW_BYTES_S}
    with open_wan(2, WanSet(loss=0.0, homes=(QUICK, QUICK), routers=("mapping", kind))) as wan:
        origin = f"http://{wan.outside(HUB, socket.AF_INET)}:8710"
        with running(wan, HUB, HUB_SIDE, about) as (hub, paths):
            tracker = [f"{origin}{path}" for path in json.loads(paths)]
            with running(wan, NODE, NODE_SIDE, {**about, "tracker": tracker[NODE]}) as (node, ready):
                assert ready == "ready\n"
                own = target.with_suffix(".torrent")
                own.write_bytes(bencode.encode({**bencode.decode(torrent.read_bytes()), "announce": tracker[CLIENT]}))
                options = {
                    "aria2c": ["--enable-dht=false", "--bt-enable-lpd=false", "--no-conf", f"--dir={target}"],
                    "transmission-cli": ["-M", "-w", str(target), "-g", str(tmp_path / "settings")],
                }[program]
                client = [*wan.command(CLIENT), program, *options, str(own)]
                fetch(client, target / artefact.name / sealed.name, sealed.read_bytes())
                uploads = [int(side.communicate("\n", timeout=20)[0]) for side in (hub, node)]
    unseal(target / artefact.name / sealed.name, tmp_path / "unsealed", key)
    assert (tmp_path / "unsealed").read_bytes() == plain
    assert sum(uploads) >= PAYLOAD_BYTES
    assert min(uploads) > 0, "both served"
