"""Programs that an episode of verifiers has left behind are found and ended."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PROGRAM = """
import json, os, subprocess, sys, time
from echo_hub.sessions.inside.verifiers_strays import adopt_orphans, descendants, end_programs

adopt_orphans()
clean = {"PATH": os.environ["PATH"]}
detached = "setsid sleep 1001 & exit"  # It outlives its shell, in a process group and a session of its own.
subprocess.run(["sh", "-c", detached], env={**clean, "TRACE": "trace-a"})
subprocess.run(["sh", "-c", detached], env={**clean, "TRACE": "trace-b"})
other = subprocess.Popen(["sleep", "1002"], env={**clean, "TRACE": "trace-a"})
time.sleep(0.2)
begun = len(descendants())
first = end_programs(["trace-a"], but=[other.pid])
time.sleep(0.2)
second = end_programs(["trace"], but=[other.pid], orphans_only=True)
third = end_programs(["trace-a"], orphans_only=True)
other.wait()
time.sleep(0.2)
end_programs([])
print(json.dumps([begun, len(first), len(second), len(third), len(descendants())]))
"""


def test_programs_are_told_by_their_marks_and_orphans_are_reaped() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=30)
    assert json.loads(done.stdout) == [3, 1, 1, 1, 0]
