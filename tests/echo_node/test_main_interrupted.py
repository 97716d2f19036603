"""Ctrl-C at any moment of a command's first seconds ends it without a traceback. As in a terminal, the whole process
group gets the signal.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import NodePaths

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and process groups")

DEADLINE_S = 60.0
BEGUN = "asyncio.constants"
"""First module that a command imports. Until this import, only Python's own start has run."""
NOISE = ("Traceback", "KeyboardInterrupt", "CancelledError", "Exception ignored", "never retrieved", "never awaited")


@pytest.fixture
def silent_hub() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


class Command:
    """`echo-node` in a process group of its own. It can be interrupted at the moment when it imports a named module:
    Python prints each import."""

    def __init__(self, home: Path, *arguments: str, moment: str = BEGUN) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "echo_node", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # TMPDIR: temporary files of a killed command stay in the test's directory.
            env={**os.environ, "ECHO_NODE_HOME": str(home), "TMPDIR": str(home.parent), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._moment = moment
        self._begun = threading.Event()
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                if self._moment in line:
                    self._begun.set()
                if not line.startswith("import time:"):
                    self._said.append(line)
        self._begun.set()

    def interrupted(self, *, after_s: float) -> tuple[int, str]:
        """Send Ctrl-C `after_s` seconds after the import of `moment`, if the command still runs; return its status and
        output.
        """
        assert self._begun.wait(DEADLINE_S)
        try:
            self._process.wait(after_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            status = self._process.wait(DEADLINE_S)
        finally:
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._reader.join()
        return status, "".join(self._said)


def ends_quietly(home: Path, *arguments: str, moment: str = BEGUN, after_s: float) -> None:
    status, said = Command(home, *arguments, moment=moment).interrupted(after_s=after_s)
    where = f"{arguments[0]}, {after_s:.2f} s after {moment}: status {status}\n{said}"
    assert [word for word in NOISE if word in said] == [], where
    ended_by_itself = "Stopping: got SIGINT." in said or "No node is running here." in said
    assert status in (130, -signal.SIGINT) or (ended_by_itself and status in (0, 1)), where


def arguments_of(name: str, hub: str, home: Path) -> list[str]:
    if name not in ("doctor", "status"):
        pytest.importorskip("llama_cpp")
    paths = NodePaths.find(home)
    if name == "run":
        Hubs(paths).save(HubRecord(url=hub, hub_key_hex="ab" * 32, joined_at=1.0, run_id="run", run_name="a run"))
    more = {
        "join": [hub, "--swarm-host", "127.0.0.1"],
        "run": ["--swarm-host", "127.0.0.1"],
        "lend": ["--host", "127.0.0.1", "--port", "0"],
        "bench": ["--seconds", "5"],
        "doctor": [hub],
        "status": [],
    }
    return [name, *more[name], "--data-dir", str(home)]


@pytest.mark.parametrize("name", ["join", "run", "lend", "bench", "doctor", "status"])
def test_ctrl_c_in_the_first_second_is_quiet(name: str, silent_hub: str, tmp_path: Path) -> None:
    for number, after_s in enumerate((0.0, 0.15, 0.4, 0.8)):
        home = tmp_path / str(number)
        ends_quietly(home, *arguments_of(name, silent_hub, home), after_s=after_s)


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("join", "Engine: "),
        ("join", "libtorrent"),
        ("lend", "llama.cpp "),
        ("lend", "Lending "),
        ("bench", "Measuring "),
        ("doctor", "echo_node.doctor"),
    ],
)
def test_ctrl_c_during_the_start_is_quiet(name: str, moment: str, silent_hub: str, tmp_path: Path) -> None:
    for number, after_s in enumerate((0.0, 0.2)):
        home = tmp_path / str(number)
        ends_quietly(home, *arguments_of(name, silent_hub, home), moment=moment, after_s=after_s)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["join", "run", "lend", "bench", "doctor"])
def test_ctrl_c_at_any_moment_is_quiet(name: str, silent_hub: str, tmp_path: Path) -> None:
    for number in range(10):
        home = tmp_path / str(number)
        ends_quietly(home, *arguments_of(name, silent_hub, home), after_s=0.2 * number)
