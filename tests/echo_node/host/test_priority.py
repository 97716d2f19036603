from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="how Linux shares cores out")
AUTOGROUP = Path("/proc/self/autogroup")
ENGINE = """
    from pathlib import Path
    from echo_node.host import priority
    priority._AUTOGROUP = Path({autogroup!r})
    priority.give_way({priority!r})
    print("ready", flush=True)
    input()
    while True:
        pass
"""


@contextmanager
def engine(priority: str, *, own_session: bool = True, autogroup: Path = AUTOGROUP) -> Iterator[subprocess.Popen[str]]:
    """Yield an engine's process with lowered priority; it begins to compute when it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ENGINE.format(priority=priority, autogroup=str(autogroup)))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=own_session,
    )
    with process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def session_niceness(pid: int) -> str:
    """Return the session's nice value, from a line such as `/autogroup-17 nice 0`."""
    return Path(f"/proc/{pid}/autogroup").read_text().split()[-1]


@linux
@pytest.mark.parametrize(("priority", "policy", "niceness"), [("lowest", "SCHED_IDLE", 19), ("low", "SCHED_OTHER", 10)])
def test_an_engine_lowers_its_own_and_its_sessions_priority(priority: str, policy: str, niceness: int) -> None:
    with engine(priority) as process:
        assert os.sched_getscheduler(process.pid) == getattr(os, policy)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == niceness
        if AUTOGROUP.exists():
            assert session_niceness(process.pid) == str(niceness)


@linux
def test_if_the_session_cannot_be_changed_the_process_still_gives_way(tmp_path: Path) -> None:
    # A directory takes the place of the kernel's file, so the write fails.
    with engine("lowest", autogroup=tmp_path) as process:
        assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19


@linux
def test_at_normal_priority_nothing_is_changed() -> None:
    with engine("normal") as process:
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        if AUTOGROUP.exists():
            assert session_niceness(process.pid) == "0"


@linux
@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel shares nothing out among sessions")
def test_a_session_with_other_processes_is_left_unchanged() -> None:
    before = AUTOGROUP.read_text()
    with engine("lowest", own_session=False) as process:
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
        assert AUTOGROUP.read_text() == before


@linux
def test_an_engine_hardly_slows_another_session_on_its_core() -> None:
    """The owner's session gets more than 90 % of the core; at equal priority it would get half."""
    core = min(os.sched_getaffinity(0))
    with engine("lowest") as process:
        os.sched_setaffinity(process.pid, {core})
        owner = f"import os, time\nos.sched_setaffinity(0, {{{core}}})\nwhile time.process_time() < 1.5: pass"
        of_engine = psutil.Process(process.pid)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        before = sum(of_engine.cpu_times()[:2])
        subprocess.run([sys.executable, "-c", owner], check=True, start_new_session=True)
        taken = sum(of_engine.cpu_times()[:2]) - before
    assert taken / (taken + 1.5) < 0.1
