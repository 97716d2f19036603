"""Two peers behind routers that both drop connections from outside fetch from each other, by uTP from both sides."""

import json
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.dissemination.wan import homes, routers
from benchmarks.dissemination.wan.emulator import Home
from benchmarks.dissemination.wan.homes import WanSet, open_wan
from benchmarks.dissemination.wan.routers import Router
from echo_shared.swarm import make_torrent

pytestmark = pytest.mark.skipif(
    not homes.can_emulate() or bool(routers.lacking()), reason="routers take root, TUN devices and nftables"
)
PORT = 6881
QUICK = Home(up=50, down=50, delay_ms=5)
PEER = """
import asyncio, json, sys
from pathlib import Path
from echo_shared.swarm import SwarmSettings, open_swarm
from echo_shared.swarm.torrent import read_torrent

async def main():
    about = json.loads(sys.argv[1])
    torrent = Path(about["torrent"]).read_bytes()
    swarm = await open_swarm(SwarmSettings(port=6881))
    peers = [(about["peer"], 6881)]
    if about["seeds"]:
        await swarm.seed(torrent, Path(about["directory"]))
        await swarm.add_peers(read_torrent(torrent).info_hash, peers)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    else:
        fetched = await swarm.fetch(torrent, Path(about["directory"]), peers=peers)
        print(fetched.swarm_bytes, flush=True)
    await swarm.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["cone", "ipv6"])
def test_two_peers_behind_routers_find_each_other(kind: Router, tmp_path: Path) -> None:
    artefact = tmp_path / "from" / "artefact"
    artefact.mkdir(parents=True)
    (artefact / "file").write_bytes(random.Random(1).randbytes(300_000))
    torrent = tmp_path / "torrent"
    torrent.write_bytes(make_torrent(artefact).torrent)
    family = socket.AF_INET6 if kind == "ipv6" else socket.AF_INET

    def command(host: int, directory: Path) -> list[str]:
        about = {"torrent": str(torrent), "peer": wan.outside(3 - host, family), "directory": str(directory)}
        return [*wan.command(host), sys.executable, "-c", PEER, json.dumps({**about, "seeds": host == 1})]

    with open_wan(2, WanSet(loss=0.0, homes=(QUICK, QUICK), routers=(kind,))) as wan:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command(1, artefact), **pipes) as seed:
            assert seed.stdout is not None and seed.stdout.readline() == "ready\n"
            fetch = subprocess.run(command(2, tmp_path / "to"), capture_output=True, text=True, timeout=60, check=True)
            seed.communicate("\n", timeout=20)
    assert int(fetch.stdout) == 300_000
    assert (tmp_path / "to" / "artefact" / "file").read_bytes() == (artefact / "file").read_bytes()
