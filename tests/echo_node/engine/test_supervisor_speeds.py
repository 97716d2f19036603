"""An engine's speed is measured once, before the node reports its capacity to the hub. Processes are real; engines are
scripted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_node.backends import registry
from echo_node.backends.base import EngineSettings
from echo_node.backends.registry import BackendChoice
from echo_node.config import NodeConfig
from echo_node.core.events import EngineLost, EngineReady
from echo_node.engine.fitting import chosen, limits_of, measured, place_of, settings_of
from echo_node.engine.speeds import FAILURE_KEPT_S, Speeds
from echo_node.engine.widths import Widths
from echo_node.host import hardware
from tests.echo_node.engine.running import Engines

pytestmark = pytest.mark.usefixtures("odd_worker")

CHOICE = BackendChoice(name="torch", device="cpu", reason="test")


class Node(Engines):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory, CHOICE)
        self.found = hardware.detect()
        self.place = place_of(CHOICE, self.found, "base")

    def describe_base(self) -> None:
        """Allow only token 0 in the measured prompts: the first token of a prompt selects a fault, and 0 means none."""
        (self.directory / "config.json").write_text('{"vocab_size": 1, "max_position_embeddings": 64}')

    def speeds(self) -> Speeds | None:
        return self.book.find(self.place, EngineSettings())

    async def start(self, max_width: int = 0, *, width: int = 0, bench_seconds: float = 0.2) -> Any:
        return await super().start(max_width, width=width, bench_seconds=bench_seconds)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    yield node
    await node.end()


async def test_an_engine_is_measured_once_before_it_reports(node: Node) -> None:
    node.describe_base()
    ready = await node.start()
    speeds = node.speeds()
    assert speeds is not None and set(speeds.decode) == {1, 8, 32, 64}
    assert ready == EngineReady(width=speeds.width, tokens_per_s=speeds.rate(speeds.width), scores=True)
    assert await node.start() == ready
    assert node.speeds() == speeds


async def test_stored_speeds_decide_the_width(node: Node) -> None:
    rows = [
        {"kind": "decode", "width": width, "tokens": 10, "seconds": 1.0, "tokens_per_s": rate}
        for width, rate in ((1, 5.0), (8, 40.0), (32, 41.0))
    ]
    node.book.remember(node.place, EngineSettings(), Speeds.now(rows))
    assert await node.start() == EngineReady(width=8, tokens_per_s=40.0, scores=True)
    assert await node.start(width=32) == EngineReady(width=32, tokens_per_s=41.0, scores=True)
    assert await node.start(width=16) == EngineReady(width=16, tokens_per_s=40.0, scores=True)


@pytest.mark.parametrize("settings", [{"width": 4}, {"bench_seconds": 0.0}])
async def test_an_engine_is_not_measured_if_useless_or_disabled(node: Node, settings: dict[str, Any]) -> None:
    node.describe_base()
    assert await node.start(**settings) == EngineReady(width=settings.get("width", 64), scores=True)
    assert node.speeds() is None


async def test_a_base_that_does_not_say_its_bounds_is_not_measured(node: Node) -> None:
    assert await node.start() == EngineReady(width=64, scores=True)
    assert node.speeds() is None


async def test_an_engine_that_fails_its_measurement_starts_without_one_next_time(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    (node.directory / "config.json").write_text("{}")  # Only the measurement reads this file.
    lost = await node.start()
    assert isinstance(lost, EngineLost) and lost.cause == "died"
    assert "the next start skips the measurement" in caplog.text
    assert await node.start() == EngineReady(width=64, scores=True)


async def test_a_narrow_memory_counts_more_than_the_best_width(node: Node) -> None:
    node.describe_base()
    (node.directory / "enough.json").write_text(json.dumps(4))
    Widths(node.directory / "widths.json").remember(node.place, 2**33, 4)
    ready = await node.start()
    assert isinstance(ready, EngineReady) and ready.width <= 4


def test_the_nodes_settings_reach_the_engine() -> None:
    config = NodeConfig(threads=3, width=7, memory_limit_bytes=2**30)
    assert settings_of(config) == EngineSettings(threads=3, width=7, stream_s=5.0, kept_keys_share=0.25)
    assert limits_of(config, hardware.detect()).memory_bytes == 2**30


def test_rates_include_only_usable_engines_on_this_base(node: Node) -> None:
    settings = EngineSettings()
    assert measured(node.book, node.found, "base", settings) == {}
    row = {"kind": "decode", "width": 8, "tokens": 10, "seconds": 1.0, "tokens_per_s": 10.0}
    expected = {}
    speeds = Speeds.now([row])
    for possible in registry.survey(node.found):
        node.book.remember(place_of(possible.choice, node.found, "base"), settings, speeds)
        if possible.missing is None:
            expected[possible.choice.name, possible.choice.device] = speeds
    assert expected and measured(node.book, node.found, "base", settings) == expected
    assert measured(node.book, node.found, "another", settings) == {}


async def test_a_failure_is_reported_for_a_day_and_then_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, gpu = EngineSettings(), hardware.Gpu(name="a GPU", memory_bytes=2**33)
    monkeypatch.setattr(registry, "_torch_has_cuda", lambda: True)
    found = replace(node.found, cuda_gpus=(gpu,))
    row = {"kind": "decode", "width": 8, "tokens": 10, "seconds": 1.0, "tokens_per_s": 10.0}
    for possible in registry.survey(found):
        failed = possible.choice.device != "cpu"
        speeds = Speeds.now((), "error 304") if failed else Speeds.now([row])
        node.book.remember(place_of(possible.choice, found, "base"), settings, speeds)
    choice = chosen(node.book, found, "base", settings, "auto")
    assert choice.device == "cpu" and "torch on cuda failed (error 304)" in choice.unused_gpu
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + FAILURE_KEPT_S)
    assert chosen(node.book, found, "base", settings, "auto").device == "cuda"


async def test_what_an_engine_does_before_its_first_work_is_known(node: Node) -> None:
    node.describe_base()
    (node.directory / "model.safetensors").write_bytes(bytes(200 * 2**10))
    (node.directory / "run-base-f32-1.gguf.7.tmp").write_bytes(bytes(100 * 2**10))
    starting = asyncio.create_task(node.start())
    seen: list[tuple[str, tuple[int, int] | None]] = []
    while not starting.done():
        await asyncio.sleep(0.001)
        now = node.engine.stage, node.engine.conversion
        if now not in seen:
            seen.append(now)
    assert isinstance(await starting, EngineReady)
    assert seen[:1] == [("The engine starts, and loads the model.", (100 * 2**10, 400 * 2**10))]
    assert ("The engine is measured for about 0 s, once for this base model.", None) in seen
    assert (node.engine.stage, node.engine.conversion) == ("", None)
