"""A real node that its hub refuses as too old, and the real installer with tiny wheelhouses."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.live_site import LiveSite
from echo_node.host import control
from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import NodePaths
from echo_shared.errors import RefusedError
from echo_shared.wire.messages import RefusalCode
from tests.driven_hub import DrivenHub

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs the installer of Linux")
ROOT = Path(__file__).resolve().parents[2]
SWARM = Path(".local", "share", "echo-swarm")
SAYS = "sys.exit('no node runs') if 'status' in sys.argv else print('echo-node {}', *sys.argv[1:])"
DIES = "sys.exit('no such processor')"
AS_INSTALLED = """
import sys
sys.path[:0] = {paths!r}
sys.prefix = {prefix!r}
from echo_node.main import run
run()
"""
"""A program that runs this checkout's node as the installed copy."""


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[DrivenHub]:
    pytest.importorskip("llama_cpp", reason="a node without any engine does not ask a hub")
    hub = DrivenHub(tmp_path / "hub")
    await hub.open()
    yield hub
    await hub.end()


def noted(home: Any) -> dict[str, Any]:
    return dict(json.loads((home.root / SWARM / "current" / "source.json").read_text()))


def versions(home: Any) -> set[str]:
    return {path.name for path in (home.root / SWARM / "versions").iterdir()}


class Owner:
    """A user who has installed from the directory `source` and joined a hub, which now refuses the node as too old."""

    def __init__(self, home: Any, hub: DrivenHub, site: LiveSite) -> None:
        self.home, self.hub, self.site = home, hub, site
        self.data_dir = home.root / "data"
        hub.refusal = RefusedError("Too old.", code=RefusalCode.PROTOCOL_VERSION)
        record = HubRecord(url=hub.url, hub_key_hex=hub.me.public_key.hex(), joined_at=0.0)
        Hubs(NodePaths.find(self.data_dir)).save(record)

    async def run(self, **environment: str) -> Any:
        paths = [str(ROOT / name) for name in ("edge_client", "shared")]
        code = AS_INSTALLED.format(paths=paths, prefix=str(self.home.root / SWARM / "current"))
        arguments = ("run", "--data-dir", self.data_dir, "--width", "4")
        kept = {**self.home.environment, "ECHO_NODE_HOME": str(self.home.root / "settings"), **environment}
        return await self.site.program(sys.executable, "-u", "-c", code, *arguments, env=kept)


def put(wheelhouse: Path, into: Path) -> None:
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(wheelhouse, into)


def test_the_installer_notes_where_it_installed_from(
    bare_home: Any, small_wheelhouse: Any, maker: Any, tmp_path: Path
) -> None:
    house = small_wheelhouse("1.0", SAYS.format("1.0"))
    bare_home.install("--from", house)
    python = [
        "--python",
        str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"),
    ]
    environment = {
        "HOME": str(bare_home.root),
        "XDG_DATA_HOME": str(bare_home.root / ".local" / "share"),
        "XDG_CONFIG_HOME": str(bare_home.root / ".config"),
    }
    assert noted(bare_home) == {
        "origin": "wheelhouse",
        "source": str(house),
        "options": python,
        "environment": environment,
    }
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    bare_home.install("--from", house, "--temporary", scratch)
    assert noted(bare_home) == {"origin": "hub", "source": "", "options": [], "environment": environment}, (
        "the same version, but from a hub"
    )
    archive = tmp_path / "echo-swarm-1.0-some-where.tar"
    maker.archive(house, archive)
    bare_home.install("--from", archive)
    assert noted(bare_home)["source"] == str(archive)


@pytest.mark.slow
async def test_a_node_too_old_for_its_hub_restarts_as_the_next_release(
    bare_home: Any, small_wheelhouse: Any, hub: DrivenHub, site: LiveSite
) -> None:
    source = bare_home.root / "wheelhouse"
    put(small_wheelhouse("1.0", SAYS.format("1.0")), source)
    bare_home.install("--from", source)
    before = versions(bare_home)
    put(small_wheelhouse("2.0", SAYS.format("2.0")), source)
    owner = Owner(bare_home, hub, site)

    running = await owner.run()
    await running.printed("Too old.")
    await running.end()
    assert versions(bare_home) == before, "automatic updates are off"

    status, said = await (await owner.run(ECHO_NODE_UPDATE="auto")).ended()
    assert status == 0, said
    assert f"updating from {source}" in said
    assert said.splitlines()[-1] == f"echo-node 2.0 run --data-dir {owner.data_dir} --width 4"
    assert noted(bare_home)["source"] == str(source), "for the next update"
    (tried,) = json.loads((bare_home.root / SWARM / "updates.json").read_text())["tries"]
    assert tried["outcome"] == "Release 2.0 was installed."
    assert before < versions(bare_home), "the previous version's files stay"


@pytest.mark.slow
async def test_a_release_that_does_not_start_is_tried_once_and_the_node_stays(
    bare_home: Any, small_wheelhouse: Any, hub: DrivenHub, site: LiveSite
) -> None:
    source = bare_home.root / "wheelhouse"
    put(small_wheelhouse("1.0", SAYS.format("1.0")), source)
    bare_home.install("--from", source)
    put(small_wheelhouse("2.0", DIES), source)
    owner = Owner(bare_home, hub, site)
    for _ in range(2):
        running = await owner.run(ECHO_NODE_UPDATE="auto")
        await running.printed(r"The installer has already run for this\. The new version does not start on")
        shown = await control.ask(NodePaths.find(owner.data_dir).control_file, "status")
        assert "The new version does not start on this machine" in shown["update"] and "too_old" in shown["problems"]
        status, said = await running.end()
        assert status == 0, said
    assert "The update failed" not in said, "the failure is remembered at the second start"
    assert bare_home.run(bare_home.echo_node).stdout == "echo-node 1.0\n"
    log = (owner.data_dir / "logs" / "update.log").read_text()
    assert log.count("no such processor") == 1
