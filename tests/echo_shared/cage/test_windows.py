"""The structures that the cage passes to Windows have the right layout. Whether Windows accepts them can be tested only
there.
"""

from __future__ import annotations

import ctypes
import sys

import pytest

from echo_shared.cage import windows
from echo_shared.cage.description import Cage


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) != 8, reason="Windows of 64 bits")
def test_structures_have_the_sizes_of_windows() -> None:
    assert ctypes.sizeof(windows.BasicLimits) == 64
    assert windows.BasicLimits.flags.offset == 16 and windows.BasicLimits.processes.offset == 40
    assert ctypes.sizeof(windows.TokenLabel) == 16


def test_the_job_allows_one_process() -> None:
    limits = windows.one_process_limits()
    assert (limits.flags, limits.processes) == (0x8 | 0x400, 1)


@pytest.mark.skipif(sys.platform == "win32", reason="there it would hold")
def test_a_refused_call_is_reported() -> None:
    held = windows.enter(Cage())
    assert (held.by, held.holds) == ((), ())
    assert held.lacks["programs"].startswith("a job object: ")
    assert held.lacks["writing"].startswith("low integrity: ")
    assert held.lacks["network"] == "Windows cannot keep a running process from the network"
