"""The garbage collector is off while modules load, and ignores the loaded modules afterwards. Each test uses a process,
because a process has only one collector.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc

from echo_shared.process.importing import uncollected

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
def test_loaded_modules_are_skipped_by_the_collector_even_if_loading_fails(last_line: str, said: str) -> None:
    program = PROGRAM.replace("{last_line}", last_line)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == (said, "", 0)


WITHOUT = """
import importlib.util

from echo_shared.process.importing import do_without

assert importlib.util.find_spec("wave")
do_without("wave", "there_is_no_such_module")
assert importlib.util.find_spec("wave") is None
import wave
"""


def test_a_module_excluded_by_name_cannot_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: import of wave halted"), done.stderr
