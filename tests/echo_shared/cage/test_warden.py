"""Sessions that exceed a limit are ended and the limit is named; other sessions continue. No process outlives the
warden.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_shared.cage.session_terms import MIB, SessionTerms

if sys.platform != "linux":
    pytest.skip("sessions have a cage on Linux only", allow_module_level=True)

from echo_shared.cage import warden
from tests.echo_shared.cage.caged_run import command, environment, run

GREEDY = Path(__file__).with_name("greedy_program.py")
CAUSES = {
    "loop": "time: it used ",
    "threads": "processes: it ",
    "memory": "memory: it asked for memory of more than 64 MB",
    "shared_memory": "memory: it asked for memory of more than 64 MB",
    "large_file": "files: it wrote a file of more than 8 MB",
    "many_large_files": "disk: its files are larger than 16 MB",
    "many_files": "disk: it has more than 200 files",
    "deep_directories": "disk: its directories are more than 32 levels deep",
    "forks_at_import": "processes: it had ",
    "crash": "status -6",
    "honest": "status 0",
}


@pytest.fixture(scope="module")
def causes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    directory = tmp_path_factory.mktemp("greedy")
    terms = SessionTerms(
        directory=str(directory / "own"),
        reads=(str(GREEDY),),
        memory_bytes=64 * MIB,
        step_cpu_s=1.0,
        processes=32,
        file_bytes=8 * MIB,
        disk_bytes=16 * MIB,
        files=200,
    )
    done = run(terms, str(GREEDY), *CAUSES)
    assert done.returncode == 0, done.stderr
    assert list((directory / "own").iterdir()) == [], "files of sessions are removed"
    yield json.loads(done.stdout)


def test_a_server_that_starts_too_many_processes_ends_with_them(tmp_path: Path) -> None:
    terms = SessionTerms(directory=str(tmp_path / "own"), reads=(str(GREEDY),), open_files=256)
    done = run(terms, str(GREEDY), *["idle"] * 300)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert re.search(r"processes: it had \d+, more than 256", done.stderr)


@pytest.mark.parametrize("way", CAUSES)
def test_a_session_that_uses_too_much_ends_with_its_cause(way: str, causes: dict[str, str]) -> None:
    assert causes[way].startswith(CAUSES[way])


LASTING = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
told, tells = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os.read(told, 1)  # The warden may end an orphan at once, so it says its id before.
        os._exit(0)
    os.write(1, b"%d\\n" % os.getpid())
    os.write(tells, b"x")
else:
    os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
"""
HUB = """
import os, subprocess, sys
subprocess.run([str(os.getpid()) if word == "HUB" else word for word in sys.argv[1:]])
"""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _until_gone(pids: list[int]) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("end", ["asked", "hub", "server"])
def test_nothing_outlives_the_server_the_hub_or_a_request_to_end(end: str, tmp_path: Path) -> None:
    program = tmp_path / "lasting.py"
    program.write_text(LASTING)
    terms = SessionTerms(directory=str(tmp_path / "own"), reads=(str(program),))
    line = [word if word != "0" else "HUB" for word in command(terms, str(program), parent=0)]
    hub = subprocess.Popen([sys.executable, "-c", HUB, *line], env=environment(), stdout=subprocess.PIPE, text=True)
    assert hub.stdout is not None
    pids = sorted(int(hub.stdout.readline()) for _ in range(2))
    (guard,) = map(int, Path(f"/proc/{hub.pid}/task/{hub.pid}/children").read_text().split())
    number = signal.SIGTERM if end == "asked" else signal.SIGKILL
    os.kill({"asked": guard, "hub": hub.pid, "server": pids[0]}[end], number)
    assert _until_gone([*pids, guard])
    hub.kill()
    hub.wait()
    hub.stdout.close()


def test_only_harmless_variables_reach_an_environment() -> None:
    kept = {"PATH": "/bin", "LC_ALL": "C"}
    secret = {"OPENAI_API_KEY": "k", "ECHO_STORE__URL": "u", "LD_PRELOAD": "/x", "HOME": "/h"}
    assert warden.clean(kept | secret, {"A": "b"}) == kept | {"USER": "echo", "LOGNAME": "echo", "A": "b"}
