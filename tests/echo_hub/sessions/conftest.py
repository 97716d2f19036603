from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from echo_hub.sessions.openings import Openings
from echo_hub.sessions.process import ProcessEnvironment
from echo_hub.sessions.program_process import ProgramPlan, SessionProcess


def wait_until_dead(processes: Iterable[psutil.Process]) -> None:
    """Wait until these processes have ended, without collecting their exit status."""
    until = time.monotonic() + 10.0
    for process in processes:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, process
            time.sleep(0.005)


@pytest.fixture(scope="session")
def dice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessEnvironment]:
    """Yield the game of `tests.echo_hub.sessions.dice`. All tests of one pytest worker share its process."""
    folder = tmp_path_factory.mktemp("dice")
    plan = ProgramPlan(
        way="fork",
        adapter="tests.echo_hub.sessions.dice:make",
        python="",
        options={"closed": str(folder / "closed.txt")},
        memory_mb=512,
        log=folder / "log.txt",
    )
    environment = ProcessEnvironment(
        "dice", SessionProcess(plan), openings=Openings(None, "dice"), declared={"max_turns": 6}, drawing_s=30.0
    )
    yield environment
    environment.stop()


@pytest.fixture(autouse=True, scope="session")
def _finds_tests() -> Iterator[None]:
    """Put the repository on the module path of the game's process, which must import the game."""
    root = str(Path(__file__).resolve().parents[3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [root, *sys.path])
        yield
