"""`echo-node doctor` says how other nodes and this one reach each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from echo_node.config import NodeConfig
from echo_node.doctor_links import examine_links
from echo_node.host.control import control_server
from echo_node.host.paths import NodePaths


@pytest.fixture
def paths(tmp_path: Path) -> NodePaths:
    return NodePaths.find(tmp_path)


@pytest.mark.parametrize(
    ("config", "level", "words"),
    [
        (NodeConfig(punching=True), "ok", "through both routers by the hub's help"),
        (NodeConfig(punching=False), "note", "does not link through routers"),
    ],
)
def test_a_node_that_does_not_run(paths: NodePaths, config: NodeConfig, level: str, words: str) -> None:
    finding = examine_links(paths, config)
    assert finding.level == level and words in finding.what
    assert bool(finding.do) == (level == "note")


@pytest.mark.parametrize("said", ["linked with 3 of 7 nodes, 2 of them through both routers", ""])
async def test_a_running_node_is_asked(paths: NodePaths, said: str) -> None:
    async with control_server(paths.control_file, {"status": lambda _: {"links": said}}):
        finding = await asyncio.to_thread(examine_links, paths, NodeConfig())
    assert (finding.subject, finding.level) == ("other nodes", "ok")
    assert finding.what == said or (not said and "a running node" in finding.what)
