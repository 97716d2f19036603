from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from echo_hub.config.sections import HubConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.worker import DETAIL_CHARACTERS
from echo_shared.process.child import Child


@asynccontextmanager
async def worker(tmp_path: Path, *, content_hash: str = "", **settings: Any) -> AsyncIterator[Child]:
    config = HubConfig.model_validate({"evaluation": {"problems": 2}, **settings})
    child = await Child.start("echo_hub.scoring.worker", name="scoring", log=tmp_path / "scorer.log")
    try:
        await child.send(
            {
                "config": config.model_dump(mode="json"),
                "base_dir": str(resolve_base("builtin:tiny")),
                "timeout_s": 10.0,
                "memory_mb": 512,
                "concurrency": 1,
                "content_hash": content_hash,
                "held_out": {"": {"prompts": ["100+100=", "200+200="], "lines": []}},
            }
        )
        async with asyncio.timeout(60):
            yield child
    finally:
        child.kill()
        await child.stop()


async def test_every_call_of_a_message_is_answered_in_order_and_failures_in_words(tmp_path: Path) -> None:
    right = PromptCodec.load(resolve_base("builtin:tiny")).encode_prompt("579")
    async with worker(tmp_path) as child:
        assert await child.receive() == {"value": "ready"}
        await child.send({"method": "respond", "arguments": [(0, [right]), (0, "x" * 5_000), (0, [right[:1]])]})
        first, failed, last = [await child.receive() for _ in range(3)]
        assert (first, last) == ({"value": 0.0}, {"value": 0.0})
        assert 0 < len(failed["failed"]) <= DETAIL_CHARACTERS
    assert "Traceback" in (tmp_path / "scorer.log").read_text()


async def test_files_that_have_changed_since_the_hub_opened_them_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": 2}')
    settings = {"task": {"name": "jsonl", "options": {"path": str(path)}}}
    async with worker(tmp_path, content_hash="another", **settings) as child:
        answer = await child.receive()
    assert "have changed" in answer["failed"]


async def test_the_log_does_not_grow_with_each_failure(tmp_path: Path) -> None:
    ids = PromptCodec.load(resolve_base("builtin:tiny")).encode_prompt("5")
    nothing = np.array([], np.int32)
    async with worker(tmp_path, task={"name": "environment:guess"}) as child:
        assert await child.receive() == {"value": "ready"}
        calls = [(0, [nothing])] * 100 + [(0, 3), (0, [ids])]
        await child.send({"method": "respond", "arguments": calls})
        answers = [await child.receive() for _ in calls]
    assert ["failed" in answer for answer in answers] == [True] * 101 + [False]
    assert (tmp_path / "scorer.log").read_text().count("Traceback") == 7 + 1


async def test_a_scoring_process_ends_with_its_parent(tmp_path: Path) -> None:
    async with worker(tmp_path) as child:
        assert await child.receive() == {"value": "ready"}
        await child.stop(timeout_s=60)
    assert (tmp_path / "scorer.log").read_text() == ""
