"""A hostile environment attacks the hub from a session, through the real process of sessions. The session ends with its
cause named; another session and the hub do not notice.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.sessions import caging
from echo_hub.sessions.kinds import SessionPlace, make_any_task
from echo_hub.sessions.process import ProcessEnvironment, ProcessSession
from echo_hub.tasks.environments.base import Observation, Reply, SessionGone
from echo_shared.cage import session_cage
from echo_shared.errors import ConfigError
from echo_shared.logs.log_file import LOG_BYTES

if why := session_cage.unsupported():
    pytest.skip(why, allow_module_level=True)

NAME = "python:tests.echo_hub.sessions.hostile_environment:make"
ROOT = Path(__file__).resolve().parents[3]
ATTACKS = {
    "read_key": "forbidden: it used the file ",
    "connect": "forbidden: it used a connection",
    "end_hub": "forbidden: it used a connection, program or process",
    "bomb": "forbidden: it used a connection, program or process",
    "memory": "The session ran out of memory.",
    "threads": "processes: it ",
    "loop": "time: it used ",
    "fill_disk": "disk: its files are larger than 16 MB",
}


@contextmanager
def hostile(directory: Path, *, trusted: bool = False) -> Iterator[ProcessEnvironment]:
    """Make the hostile environment in a run's directory that has a key file, next to an open port of this machine."""
    run = directory / "run"
    (run / "sessions").mkdir(parents=True)
    (run / "hub.key").write_text("the key")
    config = SessionsConfig(memory_mb=256, step_cpu_s=0.5, disk_mb=16, processes=32, trusted=trusted)
    with socket.create_server(("127.0.0.1", 0)) as server:
        targets = {"key": str(run / "hub.key"), "port": server.getsockname()[1], "hub": os.getpid()}
        made = make_any_task(NAME, targets, SessionPlace(config=config, run_dir=run))
        assert isinstance(made, ProcessEnvironment)
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module", autouse=True)
def module_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessEnvironment]:
    with hostile(tmp_path_factory.mktemp("hostile")) as made:
        yield made


async def _opened(environment: ProcessEnvironment) -> ProcessSession:
    session = await environment.open(environment.sample(1), 1)
    await session.reset()
    return session


@pytest.fixture
async def bystander(environment: ProcessEnvironment) -> AsyncIterator[ProcessSession]:
    session = await _opened(environment)
    yield session
    await session.close()


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_hostile_session_ends_with_its_cause(
    attack: str, environment: ProcessEnvironment, bystander: ProcessSession
) -> None:
    process = environment.process.pid
    session = await _opened(environment)
    try:
        with pytest.raises(SessionGone) as caught:
            await session.step(Reply(text=attack))
    finally:
        await session.close()
    assert ATTACKS[attack] in str(caught.value)
    said = await bystander.step(Reply(text="wait"))
    assert isinstance(said, Observation)
    assert said.text == "turn 1: nothing"
    assert environment.process.pid == process, "the process of all sessions runs on"


async def test_each_step_has_processor_time_of_its_own(bystander: ProcessSession) -> None:
    for _ in range(4):  # Together, the steps use more than one may.
        said = await bystander.step(Reply(text="work"))
        assert isinstance(said, Observation) and said.text.endswith("worked")


async def test_a_session_that_prints_much_stops_no_other(
    environment: ProcessEnvironment, bystander: ProcessSession
) -> None:
    log = environment.process.plan.log
    assert log is not None
    session = await _opened(environment)
    said = await session.step(Reply(text="flood"))  # Twice this is more than `disk_mb`, the limit on a file.
    await session.close()
    assert isinstance(said, Observation)
    assert isinstance(await bystander.step(Reply(text="flood")), Observation)
    assert 0 < log.stat().st_size < 2 * LOG_BYTES


async def test_a_trusted_environment_runs_without_a_cage(tmp_path: Path) -> None:
    with hostile(tmp_path, trusted=True) as environment:
        session = await _opened(environment)
        for attack, result in (("read_key", "the key"), ("connect", "connected"), ("end_hub", "signalled")):
            said = await session.step(Reply(text=attack))
            assert isinstance(said, Observation)
            assert said.text.endswith(result)
        await session.close()


async def test_without_a_cage_an_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_cage, "unsupported", lambda _: "this kernel has no Landlock")
    with hostile(tmp_path) as environment, pytest.raises(ConfigError) as caught:
        environment.sample(1)
    assert f"The environment {NAME} is not part of Echo" in str(caught.value)
    assert "this kernel has no Landlock" in str(caught.value)
    assert "sessions.trusted" in str(caught.value)


def test_the_settings_limit_an_environment(tmp_path: Path) -> None:
    config = SessionsConfig(memory_mb=100, disk_mb=10, step_cpu_s=3.0, processes=7)
    terms = caging.terms_of(config, directory=tmp_path, hidden=[tmp_path], children="programs", connects=[80])
    assert (terms.memory_bytes, terms.disk_bytes, terms.file_bytes) == (100 * 2**20, 10 * 2**20, 10 * 2**20)
    assert (terms.step_cpu_s, terms.processes, terms.children, terms.connects) == (3.0, 7, "programs", (80,))
    line = caging.caged("/other/python", ["program.py", "fork"], terms)
    assert line[0] == sys.executable
    assert line[-3:] == ("/other/python", "program.py", "fork")


SERVER = """
import http.server, json, os, socket, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = {}
        for name, one in ATTEMPTS.items():
            try:
                one()
                found[name] = "done"
            except OSError as error:
                found[name] = type(error).__name__
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

ATTEMPTS = {
    "read": lambda: open(sys.argv[2]).read(),
    "connect": lambda: socket.create_connection(("127.0.0.1", int(sys.argv[3])), timeout=5),
    "listen": lambda: socket.create_server(("127.0.0.1", 0)),
    "fork": os.fork,
    "write": lambda: open("own", "w").write("x"),
}
import helper
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_of_an_environment_only_listens(tmp_path: Path) -> None:
    module = tmp_path / "module"
    module.mkdir()
    (module / "helper.py").touch()
    (tmp_path / "program").mkdir()
    program = tmp_path / "program" / "server.py"
    program.write_text(SERVER)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hub.key").write_text("the key")
    place = {
        "task": "openenv:helper:app",
        "sessions": SessionsConfig().model_dump(),
        "hidden": [str(tmp_path / "run")],
        "directory": str(tmp_path / "run" / "sessions"),
    }
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as free:
        targets = [str(tmp_path / "run" / "hub.key"), str(other.getsockname()[1])]
        port = free.getsockname()[1]
        free.close()
        line = caging.server_command(
            sys.executable, [str(program), str(port), *targets], place, reads=module, port=port
        )
        server = subprocess.Popen(line, stderr=subprocess.DEVNULL)
        try:
            found = _asked(port)
        finally:
            server.terminate()
            server.wait()
    refused = "PermissionError"
    assert found == {"read": refused, "connect": refused, "listen": refused, "fork": refused, "write": "done"}


def _asked(port: int) -> dict[str, str]:
    until = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20) as answer:
                found: dict[str, str] = json.load(answer)
                return found
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)
