"""An engine is made from the current settings and the current base model, read at its start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from echo_node.backends import registry
from echo_node.config import NodeConfig
from echo_node.core.events import EngineReady
from echo_node.engine.fitting import place_of, settings_of
from echo_node.engine.making import EngineMaker
from echo_node.engine.speeds import SpeedBook, Speeds
from echo_node.host import hardware
from echo_node.host.artefact_files import content_here, write_marker
from echo_node.host.paths import NodePaths
from echo_shared.wire.messages import Fetched
from tests.echo_node.engine.running import PATIENCE_S, files_in
from tests.echo_node.host.test_artefact_files import manifest_of


class Node:
    def __init__(self, paths: NodePaths) -> None:
        self.paths = paths
        self.news: asyncio.Queue[Any] = asyncio.Queue()
        self.maker = EngineMaker(paths, NodeConfig(bench_seconds=0), self.news)

    def fetch_base(self, run_id: str) -> str:
        """Create a base model as if it had been fetched; return the hash of its content."""
        directory = self.paths.base(run_id)
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        report = Fetched(info_hash=bytes(20), policy_version=None, seconds=1.0, swarm_bytes=2, web_seed_bytes=0)
        write_marker(directory, manifest_of(directory, "base"), report)
        content = content_here(directory)
        assert content is not None
        return content


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(NodePaths.find(tmp_path / "node"))


def test_the_current_settings_decide_the_choice(node: Node) -> None:
    pytest.importorskip("llama_cpp")
    found, choice = node.maker.look()
    assert found == hardware.detect() and choice == registry.choose(found)
    node.maker.config = NodeConfig(backend="llama_cpp")
    assert node.maker.look()[1] == registry.choose(found, "llama_cpp") != choice


def test_measured_speeds_count_for_their_base_once_it_is_present(node: Node) -> None:
    found, by_rank = node.maker.look()
    usable = [one.choice for one in registry.survey(found) if one.missing is None and not one.on_request]
    if len(usable) < 2:
        pytest.skip("of one engine, there is nothing to choose")
    content, book = node.fetch_base("run"), SpeedBook(node.paths.speeds)
    for rate, choice in enumerate(usable, start=1):
        row = {"kind": "decode", "width": 8, "tokens": 10, "seconds": 1.0, "tokens_per_s": 10.0 * rate}
        book.remember(place_of(choice, found, content), settings_of(node.maker.config), Speeds.now([row]))
    for run_id in (None, "another"):
        node.maker.run_id = run_id
        assert node.maker.look()[1] == by_rank
    node.maker.run_id = "run"
    fastest = node.maker.look()[1]
    assert (fastest.name, fastest.device) == (usable[-1].name, usable[-1].device)


@pytest.mark.usefixtures("odd_worker")
async def test_an_engine_is_made_with_the_settings_of_the_moment(node: Node, tmp_path: Path) -> None:
    await node.maker.chooser.decide()
    widths = []
    for width in (3, 5):
        node.maker.config = NodeConfig(bench_seconds=0, width=width)
        engine = node.maker.make(files_in(tmp_path))
        run = asyncio.create_task(engine.run(0.0, 0))
        async with asyncio.timeout(PATIENCE_S):
            ready = await node.news.get()
        assert isinstance(ready, EngineReady), ready
        widths.append(ready.width)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    assert widths == [3, 5] and not node.maker.changed.is_set()
