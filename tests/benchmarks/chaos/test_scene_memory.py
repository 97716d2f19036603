"""The chaos benchmark's memory limit: the kernel kills a process that exceeds it; a smaller process continues."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from benchmarks.chaos.scene import lacking_memory, memory_group

TAKES = "x = bytearray(2**27); print('taken', flush=True); input(); y = bytearray(2**26); print('more', flush=True)"


@pytest.mark.parametrize("is_squeezed", [True, False])
def test_too_little_memory(is_squeezed: bool) -> None:
    if why := lacking_memory():
        pytest.skip(why)
    with memory_group() as group:
        process = subprocess.Popen(
            [*group.command, sys.executable, "-c", TAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        if is_squeezed:
            group.squeeze()
        said, _ = process.communicate("\n", timeout=60)
        group.release()
        assert (process.returncode == -signal.SIGKILL) == is_squeezed
        assert (said == "more\n") == (not is_squeezed)


GROWS = "x = []; print('taken', flush=True)\nfor _ in range(2**10): x.append(bytearray(2**20))\ninput()"


def test_processes_that_grow_during_the_squeeze_are_squeezed_too() -> None:
    if why := lacking_memory():
        pytest.skip(why)
    with memory_group() as group:
        growing = [
            subprocess.Popen(
                [*group.command, sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(3)
        ]
        for process in growing:
            assert process.stdout is not None and process.stdout.readline() == "taken\n"
        group.squeeze()
        for process in growing:
            process.communicate("\n", timeout=60)
        group.release()
        assert -signal.SIGKILL in {process.returncode for process in growing}
