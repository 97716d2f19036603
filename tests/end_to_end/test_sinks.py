"""A run whose metrics cannot be written anywhere must train to its end, and its operator must be told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
async def test_a_broken_sink_stops_nothing_and_is_reported(
    site: Any, until: Any, operator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "wandb.py").write_text("raise RuntimeError('no luck')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"), prepend=os.pathsep)
    run = await site.make_run("run", metrics={"wandb": "online", "texts": 2})
    hub, url = await site.hub(run)
    node = await site.node(url, "volunteer")
    view = await until(url, lambda view: view["state"] == "finished" and view["problems"])
    (problem,) = view["problems"]
    assert problem.startswith("Weights & Biases gets no figures; the run continues without it, ")
    assert [problem in event["text"] for event in view["events"]].count(True) == 1, "it is said once"
    async with aiohttp.ClientSession(url, headers=operator(url)) as http, http.get("/readyz") as answer:
        assert answer.status == 200, "the run does not need the sink"
    assert (await node.end())[0] == 0
    assert (await hub.end())[0] == 0
    assert list((run / "tensorboard").glob("events.out.tfevents.*")), "the working sink has all figures"
