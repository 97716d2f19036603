"""Real processes that compute, beside what this process computes itself."""

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
"""Of computing, for hundredths of a second not to matter."""
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
    """The share that a process adds to others' when it is not the node's, and the one that it really had."""
    while computed_s(pid) < 0.1:  # It has begun, as important as it is to be.
        time.sleep(0.01)
    as_other, as_own = OthersLoad(), OthersLoad()
    as_other.share(())
    as_own.share((pid,))
    before_s, began = computed_s(pid), time.monotonic()
    while computed_s(pid) - before_s < ENOUGH_S:
        psutil.pids()  # This process computes too, which is not others' work.
    shares = as_other.share(()), as_own.share((pid,))
    had = (computed_s(pid) - before_s) / (time.monotonic() - began) / (psutil.cpu_count() or 1)
    assert shares[0] is not None and shares[1] is not None
    return shares[0] - shares[1], had


def test_the_first_look_has_nothing_to_compare_with() -> None:
    load = OthersLoad()
    assert load.share(()) is None and load.share(()) is None


@important
def test_another_program_counts_by_what_it_computes_and_one_s_own_do_not() -> None:
    with spinning(0) as pid:
        added, had = counted(pid)
    assert 0.7 * had < added < 1.3 * had


@pytest.mark.slow
@linux
def test_what_gives_way_by_itself_does_not_count() -> None:
    with spinning(19) as pid:
        added, had = counted(pid)
    assert abs(added) < 0.3 * had
