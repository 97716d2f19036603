"""Real processes: Echo's own processes do not count as other programs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from echo_node.host.sensors import kin
from echo_node.host.sensors.kin import HUB, LOOK_S, Kin, package_of, sees_the_machines_pids


@pytest.fixture
def processes() -> Iterator[tuple[int, int]]:
    """Yield the ids of two processes; only the first one's command line looks like that of a hub's learner."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    commands = (
        [sys.executable, "-c", code, "-m", "echo_hub.learner.serve"],
        [sys.executable, "-c", code, "-m", "game"],
    )
    started = [subprocess.Popen(one, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for one in commands]
    for one in started:
        assert one.stdout is not None and one.stdout.readline()
    yield started[0].pid, started[1].pid
    for one in started:
        one.communicate()


def test_a_learner_is_kin_and_a_game_is_not(processes: tuple[int, int]) -> None:
    learner, game = processes
    found = Kin()
    assert found.package_of(learner) == HUB and found.package_of(game) == ""
    assert learner in found.pids() and game not in found.pids()


def test_a_process_that_has_ended_is_no_kin() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not Kin().package_of(ended.pid)


def test_a_process_of_another_user_is_no_kin(processes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kin, "_user", lambda: "somebody else")
    assert not Kin().package_of(processes[0])


def test_a_number_that_another_process_has_now_is_looked_at_again(processes: tuple[int, int]) -> None:
    found = Kin()
    found._known[processes[1]] = (0.0, HUB)  # Simulate a cached result for an earlier process with the same id.
    assert not found.package_of(processes[1])


def test_all_processes_are_looked_at_now_and_then(processes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    found, now = Kin(), time.monotonic()
    assert processes[0] in found.pids()
    monkeypatch.setattr(psutil, "pids", list)
    assert processes[0] in found.pids()
    monkeypatch.setattr(time, "monotonic", lambda: now + LOOK_S + 60)
    assert not found.pids()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "-m", "echo_hub.learner.serve", "12"], "echo_hub"),
        (["python", "-X", "utf8", "-m", "echo_node.backends.worker"], "echo_node"),
        (["python", "-m", "echo_node", "join", "http://hub"], "echo_node"),
        (["/home/me/.local/bin/echo-node", "run"], "echo_node"),
        (["/usr/bin/python", "/home/me/.local/bin/echo-hub", "serve", "run"], "echo_hub"),
        (["echo-node.exe", "run"], "echo_node"),
        (["python", "-m", "echo_nodes"], ""),
        (["vim", "notes", "echo-node"], ""),
        (["blender"], ""),
        ([], ""),
    ],
)
def test_a_command_is_known_by_its_module_or_program(command: list[str], expected: bool) -> None:
    assert package_of(command) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's namespaces")
def test_a_container_is_told_from_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    code = "from echo_node.host.sensors.kin import sees_the_machines_pids as sees; print(sees())"
    said = subprocess.run([*inside, code], capture_output=True, text=True, check=False, timeout=60)
    if said.returncode:
        pytest.skip(f"no rights for a namespace: {said.stderr.strip()}")
    assert said.stdout == "False\n"
    monkeypatch.setattr(kin, "_FIRST_NAMESPACE", kin._NAMESPACE.stat().st_ino)
    assert sees_the_machines_pids()
