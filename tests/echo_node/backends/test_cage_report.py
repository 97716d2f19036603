"""For each step of the real cage (the engine's sandbox), a report names the system calls and files that it refuses to a
stub of NVIDIA's driver.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echo_node.backends import cage_report
from echo_node.backends.cage_report import report, try_step
from echo_node.backends.registry import BackendChoice
from echo_shared.cage.leeway import BY_NAME, SEALED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's own")

CUDA = BackendChoice(name="torch", device="cuda", reason="test")
START = "from echo_node.backends import cuda_driver; cuda_driver.start()"


@pytest.mark.usefixtures("stub_cuda")
def test_the_call_that_keeps_cuda_from_starting_is_named() -> None:
    first, sealed, refused, *rest = report(CUDA, {"torch": (START,)})
    assert first == "torch on cuda:"
    assert 'step "sealed"' in sealed and "cuInit failed with error 304" in sealed
    assert refused == "    refused: socket(AF_UNIX, SOCK_SEQPACKET): EAFNOSUPPORT"
    assert [line.rpartition(": ")[2] for line in rest] == ["it starts", "ENOENT"]
    assert rest[1] == "    refused: connect('/tmp/nvidia-mps/control'): ENOENT"


@pytest.mark.usefixtures("stub_cuda")
def test_the_file_that_is_kept_closed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_CUDA_NEEDS", "read /etc/passwd")
    tried = try_step(CUDA, BY_NAME["listening socket"], START)
    assert "error 304" in tried.failure and tried.unopened == ["/etc/passwd (to read)"]
    assert not try_step(CUDA, BY_NAME["system files"], START).unopened


@pytest.mark.usefixtures("stub_cuda")
def test_a_working_step_reports_the_refusals_that_the_driver_tolerates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_CUDA_NEEDS", "fork")
    tried = try_step(CUDA, BY_NAME["local sockets"], START)
    assert tried.failure and "clone(): EPERM" in tried.refused
    free = try_step(CUDA, BY_NAME["no call filter"], START)
    assert (free.failure, free.refused, free.unwatched) == ("", {}, "the step has no filter")


def test_a_name_that_is_bound_and_a_program_are_named() -> None:
    code = (
        "import os, socket\n"
        "for act in (lambda: socket.socket(socket.AF_UNIX, 1), lambda: os.execv('/bin/true', ['true'])):\n"
        "    try: act()\n"
        "    except OSError: pass"
    )
    refused = try_step(CUDA, SEALED, code).refused
    assert refused == {"socket(AF_UNIX, SOCK_STREAM): EAFNOSUPPORT": 1, "execve('/bin/true'): EPERM": 1}


def test_code_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cage_report, "_PATIENCE_S", 8.0)
    assert try_step(CUDA, SEALED, "import threading; threading.Event().wait()").failure.startswith("exit status -9")


def test_a_report_says_if_the_parent_may_not_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "the process cannot be watched: Operation not permitted")

    monkeypatch.setattr(cage_report, "Supervisor", refuse)
    tried = try_step(CUDA, SEALED, "open('/etc/hostname')")
    assert tried.unwatched == "the process cannot be watched: Operation not permitted" and tried.failure
