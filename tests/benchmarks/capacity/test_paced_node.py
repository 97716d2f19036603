"""The launcher is `echo-node`."""

from __future__ import annotations

import subprocess
import sys


def test_it_has_the_commands_of_a_node() -> None:
    command = [sys.executable, "-m", "benchmarks.capacity.paced_node", "join", "--help"]
    assert "--data-dir" in subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_it_loads_no_torch() -> None:
    program = (
        "import sys, benchmarks.capacity.paced_node, benchmarks.capacity.paced_engine; print('torch' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert told.strip() == "False"
