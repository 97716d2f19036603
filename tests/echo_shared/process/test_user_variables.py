"""A user without a name, as in a container, gets a name and a home from environment variables, also in child
processes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echo_shared.process.user_variables import user_variables
from tests.homeless import USER, run_homeless

TOLD = """
import getpass
from echo_shared.process.child import ParentPipe
ParentPipe().send({"user": getpass.getuser()})
"""
PARENT = """
import asyncio, sys
from pathlib import Path
from echo_shared.process.child import Child
async def main():
    child = await Child.start("told", name="told", log=Path(sys.argv[1]))
    print((await child.receive())["user"])
    await child.stop(timeout_s=10)
asyncio.run(main())
"""


def test_a_user_with_a_name_and_a_home_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.setenv("HOME", "/home/me")
    assert user_variables() == {}


def test_the_systems_list_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("getpass.getuser", lambda: "listed")
    assert user_variables()["USER"] == "listed"


@pytest.mark.parametrize("failure", [KeyError, OSError, ImportError])
def test_an_unknown_user_gets_a_name(failure: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise failure

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("getpass.getuser", unknown)
    assert user_variables()["USER"] == (f"user-{os.getuid()}" if os.name == "posix" else "user")


def test_every_child_has_a_name(tmp_path: Path) -> None:
    """PyTorch asks for the user's name in every process that loads it: engine, learner and verifier."""
    (tmp_path / "told.py").write_text(TOLD)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = run_homeless("-c", PARENT, str(tmp_path / "log"), env={"PYTHONPATH": path})
    assert said.stdout == f"user-{USER}\n", said.stderr
