"""What the collector does while modules are loaded, and behind it; in a process of its own, for it is the process's."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc

from echo_shared.importing import uncollected

try:
    with uncollected():
        assert not gc.isenabled()
        loaded = [[] for _ in range(10_000)]
        {last_line}
except ModuleNotFoundError:
    print("not there")
assert gc.isenabled() and gc.get_freeze_count() >= 10_000
"""


@pytest.mark.parametrize(
    ("last_line", "said"), [("import json", ""), ("import there_is_no_such_module", "not there\n")]
)
def test_what_is_loaded_is_passed_over_however_loading_ends(last_line: str, said: str) -> None:
    program = PROGRAM.replace("{last_line}", last_line)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == (said, "", 0)


WITHOUT = """
import importlib.util

from echo_shared.importing import do_without

assert importlib.util.find_spec("wave")
do_without("wave", "there_is_no_such_module")
assert importlib.util.find_spec("wave") is None
import wave
"""


def test_what_is_done_without_is_not_there() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: import of wave halted"), done.stderr
