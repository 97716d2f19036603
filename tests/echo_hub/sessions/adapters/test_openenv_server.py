from __future__ import annotations

import asyncio
import os
import signal
import sys
import venv
from pathlib import Path

import psutil
import pytest

from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.sessions.adapters.openenv_environment import OpenEnvEnvironment
from echo_hub.sessions.adapters.openenv_options import OpenEnvOptions, ServerPlace
from echo_hub.sessions.adapters.openenv_server import ModuleServer
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import EnvironmentAway
from echo_shared.errors import ConfigError
from tests.agents import agents_python
from tests.openenv_servers import WORLDS


def started(folder: Path, module: str = "guessing:app", *, python: str = "", trusted: bool = True) -> ModuleServer:
    config = SessionsConfig(python=python or str(agents_python()), trusted=trusted)
    place = {"task": "openenv:guessing:app", "directory": str(folder), "hidden": [], "sessions": config.model_dump()}
    return ModuleServer(module, directory=str(WORLDS), place=place, ready_s=60)


async def test_a_module_is_started_once_and_again_after_its_death(tmp_path: Path) -> None:
    server = started(tmp_path)
    try:
        first, same = await asyncio.gather(server.origin(), server.origin())
        assert first == same
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while server.pid is not None:  # noqa: ASYNC110 - Nothing tells of the death of another process.
                await asyncio.sleep(0.02)
        settings = server._place["sessions"]
        python, settings["python"] = settings["python"], "/no/such/python"
        with pytest.raises(EnvironmentAway, match="cannot be started"):  # What has worked is no wrong setting.
            await server.origin()
        settings["python"] = python
        await server.origin()
        assert server.pid not in (None, pid)
    finally:
        last = server.pid
        await server.close()
    assert last is not None
    assert not psutil.pid_exists(last)


async def test_a_server_that_does_not_answer_is_started_anew(tmp_path: Path) -> None:
    server = started(tmp_path)
    options = OpenEnvOptions.read("openenv:guessing:app", {"action": "number", "connect_s": 1.0})
    environment = OpenEnvEnvironment(ServerPlace(module="guessing:app"), options, server)
    problem = Problem(prompt="", metadata={"seed": 1})
    try:
        await (await environment.open(problem, 0)).close()
        pid = server.pid
        assert pid is not None
        await server.end_if_silent(10)
        assert server.pid == pid, "a server that answers goes on"
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EnvironmentAway):
            await environment.open(problem, 0)
        assert server.pid is None
        await (await environment.open(problem, 0)).close()
        assert server.pid not in (None, pid)
    finally:
        await server.close()


async def test_a_server_ends_with_the_process_that_started_it() -> None:
    process = await asyncio.create_subprocess_exec(
        str(agents_python()),
        str(Path(sys.modules[ModuleServer.__module__].__file__ or "").parent.parent / "inside" / "openenv_app.py"),
        "guessing:app",
        "0",
        str(WORLDS),
        stdin=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.mark.parametrize(
    ("module", "told"),
    [("no_such_module:app", "no_such_module"), ("guessing:no_such_app", "no_such_app")],
)
async def test_a_module_that_cannot_be_served_is_a_wrong_setting(tmp_path: Path, module: str, told: str) -> None:
    server = started(tmp_path, module)
    with pytest.raises(ConfigError) as raised:
        await server.origin()
    assert told in (raised.value.got or "")
    await server.close()


async def test_an_interpreter_without_uvicorn_is_named(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    server = started(tmp_path, python=str(python))
    with pytest.raises(ConfigError) as raised:
        await server.origin()
    assert f"There is no uvicorn in {python}" in (raised.value.got or "")


async def test_no_interpreter_is_a_wrong_setting(tmp_path: Path) -> None:
    server = started(tmp_path, python="/no/such/python")
    with pytest.raises(ConfigError, match="cannot be started"):
        await server.origin()
