"""An environment's program attacks the machine from three places: the process that holds sessions, a session, and a
started program. Each attempt succeeds without a cage, so the attempt itself works.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from echo_shared.cage import landlock, session_cage
from echo_shared.cage.session_terms import Children, SessionTerms

if sys.platform != "linux":
    pytest.skip("sessions have a cage on Linux only", allow_module_level=True)

from tests.echo_node.backends.test_caging import OTHER_REFUSALS, REFUSED_BY_SOME, _listeners
from tests.echo_node.prying_worker import ATTEMPTS, LINUX
from tests.echo_shared.cage.caged_run import ROOT, environment, run
from tests.echo_shared.cage.hostile_program import MORE

PROGRAM = str(Path(__file__).with_name("hostile_program.py"))
SECRET = ctypes.create_string_buffer(b"a secret")
NAMES = [*ATTEMPTS, *LINUX, *MORE]
NO_NEW_PROCESS = ("fork",)
"""Attempts to start a process that succeed in the process that holds sessions, because it must fork each session."""
PROGRAMS = {
    "start_a_program": "done",
    "start_a_program_by_the_system": "done",
    "fork": "done",
    "listen": "done",
    "connect_by_tcp": "ConnectionRefusedError(",  # The same error as for a port without a listening program.
    "connect_to_a_unix_socket": "PermissionError(",
    "connect_to_an_abstract_socket": "PermissionError(",
    "read_a_file_by_a_link": "PermissionError(",
    "read_by_a_link_in_its_own_directory": "PermissionError(",
}
"""Results of attempts by a server that may start programs, and let them use sockets among themselves."""
LOOKING = """
import my_module
try:
    open("../../hub.key")
except PermissionError:
    print("hidden")
"""
Outcomes = dict[str, dict[str, str]]


def targets_in(directory: Path, stack: ExitStack) -> dict[str, Any]:
    base, scratch = directory / "base", directory / "scratch"
    for made in (base, scratch):
        made.mkdir()
    (base / "weights").write_bytes(b"weights")
    opened = stack.enter_context((scratch / "open").open("wb"))
    os.set_inheritable(opened.fileno(), True)
    targets = _listeners(stack, directory)
    for name in ("private", "victim", "doomed", "open"):
        if name != "open":
            (scratch / name).write_bytes(b"private")
        targets[name] = str(scratch / name)
    targets |= {"base": str(base), "scratch": str(scratch), "hub": os.getpid()}
    return targets | {"address": ctypes.addressof(SECRET)}


def attacked(directory: Path, place: str, children: Children | None) -> dict[str, str]:
    with ExitStack() as stack:
        targets = targets_in(directory, stack)
        own = directory / "own"
        if children is None:
            own.mkdir()
            done = subprocess.run(
                [sys.executable, PROGRAM, place, json.dumps(targets)],
                cwd=own,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                close_fds=False,
            )
        else:
            terms = SessionTerms(
                directory=str(own),
                reads=(str(ROOT), targets["base"]),
                hidden=(targets["scratch"],),
                children=children,
            )
            done = run(terms, PROGRAM, place, json.dumps(targets))
        assert (Path(targets["victim"])).exists(), "attempts undo their changes"
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    cases: dict[str, tuple[str, Children | None]] = {
        "bare": ("bare", None),
        "server": ("server", "forks"),
        "session": ("session", "forks"),
        "programs": ("server", "programs"),
    }
    yield {name: attacked(tmp_path_factory.mktemp(name), *case) for name, case in cases.items()}


@pytest.mark.parametrize("name", NAMES)
def test_attempts_of_an_environment_are_refused(name: str, outcomes: Outcomes) -> None:
    bare = outcomes["bare"][name]
    if bare != "done" and name in REFUSED_BY_SOME:
        pytest.skip(f"refused without a cage as well, by {REFUSED_BY_SOME[name]}: {bare}")
    assert bare == "done"
    expected = OTHER_REFUSALS.get(name, "PermissionError(")
    assert outcomes["session"][name].startswith(expected)
    assert outcomes["server"][name].startswith("done" if name in NO_NEW_PROCESS else expected)
    if landlock.abi() >= landlock.SCOPES_ABI:
        assert outcomes["programs"][name].startswith(PROGRAMS.get(name, expected))


def test_a_cage_that_does_not_hide_a_file_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    key = tmp_path / "run" / "hub.key"
    key.write_text("key")
    terms = SessionTerms(directory=str(tmp_path / "own"), reads=(str(key),), hidden=(str(tmp_path / "run"),))
    done = run(terms, PROGRAM, "server", "{}")
    assert (done.returncode, done.stdout) == (71, "")
    assert f"the cage does not hide {key}" in done.stderr


def test_a_run_among_the_operators_modules_is_hidden(tmp_path: Path) -> None:
    """The hub may run as `python -m` in a directory that contains both the operator's modules and the run. That
    directory is then on its import path, so a session can import the modules, but must not read the run.
    """
    own = tmp_path / "run" / "sessions" / "own"
    own.mkdir(parents=True)
    (tmp_path / "my_module.py").write_text("print('imported')")
    (tmp_path / "run" / "hub.key").write_text("key")
    program = tmp_path / "program.py"
    program.write_text(
        "import my_module\ntry:\n    open('../../hub.key')\nexcept PermissionError:\n    print('hidden')"
    )
    terms = SessionTerms(directory=str(own), reads=(str(tmp_path),), hidden=(str(tmp_path / "run"),))
    done = run(terms, str(program))
    assert (done.stdout, done.stderr) == ("imported\nhidden\n", "")


def test_old_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = SessionTerms(directory="/tmp")
    assert session_cage.unsupported(terms) == ""
    monkeypatch.setattr(landlock, "abi", lambda: 5)
    assert session_cage.unsupported(terms) == ""
    programs = SessionTerms(directory="/tmp", children="programs")
    assert "needs Landlock 6" in session_cage.unsupported(programs).replace("need ", "needs ")
    monkeypatch.setattr(landlock, "abi", lambda: 2)
    assert "this kernel has Landlock 2, and sessions need Landlock 3" in session_cage.unsupported(terms)


def test_terms_survive_their_text() -> None:
    terms = SessionTerms(directory="/d", reads=("/a",), hidden=("/b",), connects=(1,), environment={"A": "b"})
    assert SessionTerms.of_text(terms.to_text()) == terms
