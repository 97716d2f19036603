"""A small real run with the built-in model, and its bundle. The hub itself samples, so no nodes are needed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from echo_hub.bundles.writing import write_bundle
from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.opening import open_hub
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity

STEPS = 3
SETTINGS: dict[str, Any] = {
    "run": {"name": "small", "mode": "colocated", "seed": 11},
    "training": {"steps": STEPS, "groups_per_step": 6, "group_size": 4, "lora_rank": 4},
    "sampling": {"max_tokens": 6},
    "evaluation": {"problems": 4},
    "learner": {"threads": 1, "device": "cpu"},
    "task": {"scorer_processes": 1},
    "server": {"port": 0},
}


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Return a finished run of `STEPS` steps."""
    directory = RunDirectory(tmp_path_factory.mktemp("bundled") / "run")
    config = load_config(None, SETTINGS)
    make_run(directory, config)

    async def serve() -> None:
        async with open_hub(config, directory) as hub:
            serving = asyncio.create_task(hub.serve())
            finished = asyncio.create_task(hub.progress.finished.wait())
            async with asyncio.timeout(120):
                await asyncio.wait([serving, finished], return_when=asyncio.FIRST_COMPLETED)
            assert finished.done(), serving.exception()
            serving.cancel()
            await asyncio.wait([serving])

    asyncio.run(serve())
    return directory


@pytest.fixture(scope="session")
def bundle(run: RunDirectory) -> Path:
    """Return the run's bundle. It contains the checkpoint from which the last step can be repeated."""
    out = run.root.parent / "bundle"
    write_bundle(run, out, step=STEPS)
    return out


@pytest.fixture(scope="session")
def hub_key(run: RunDirectory) -> Identity:
    return key_file.load(run.key)
