from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = (
    "import psutil; from echo_shared.process.priority import yield_to_others as y; y(); print(psutil.Process().nice())"
)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has priority classes")
def test_the_process_becomes_nicer_and_never_less_so() -> None:
    def niceness(*before: str) -> int:
        return int(subprocess.run([*before, sys.executable, "-c", SCRIPT], capture_output=True, check=True).stdout)

    assert niceness() == 10
    assert niceness("nice", "-n", "15") == 15
