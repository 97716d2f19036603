"""The CPU load of other programs while the node's own processes compute too; all processes are real."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from echo_node.host.sensors.load import OthersLoad

ENOUGH_S = 0.6
"""Seconds of computing after which the kernel's resolution of 0.01 s no longer matters."""
linux = pytest.mark.skipif(sys.platform != "linux", reason="others do not tell low priorities apart")
important = pytest.mark.skipif(sys.platform != "linux" or os.nice(0) > 0, reason="all that this starts gives way, too")


@contextmanager
def spinning(niceness: int) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", f"import os; os.nice({niceness})\nwhile True: pass"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def computed_s(pid: int) -> float:
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


def counted(pid: int) -> tuple[float, float]:
    """Return two shares of all cores: the process's load that `OthersLoad` counts as another program's, and its true
    load.
    """
    while computed_s(pid) < 0.1:  # Wait until the process has its final priority.
        time.sleep(0.01)
    as_other, as_own = OthersLoad(), OthersLoad()
    as_other.share(())
    as_own.share((pid,))
    before_s, began = computed_s(pid), time.monotonic()
    while computed_s(pid) - before_s < ENOUGH_S:
        psutil.pids()  # Keep this process busy: its own load must not count.
    shares = as_other.share(()), as_own.share((pid,))
    had = (computed_s(pid) - before_s) / (time.monotonic() - began) / (psutil.cpu_count() or 1)
    assert shares[0] is not None and shares[1] is not None
    return shares[0] - shares[1], had


def test_the_first_look_has_nothing_to_compare_with() -> None:
    load = OthersLoad()
    assert load.share(()) is None and load.share(()) is None


@important
def test_only_other_programs_count_as_load() -> None:
    with spinning(0) as pid:
        added, had = counted(pid)
    assert 0.7 * had < added < 1.3 * had


@pytest.mark.slow
@linux
def test_low_priority_programs_do_not_count() -> None:
    with spinning(19) as pid:
        added, had = counted(pid)
    assert abs(added) < 0.3 * had
