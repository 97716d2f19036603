"""The learner's process must not find bitsandbytes and SciPy, because other libraries would import them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo_hub.learner import unquantized

PROGRAM = """
import gc, importlib.util, json, sys

assert importlib.util.find_spec("scipy") is None
if __name__ == "__main__":
    can_collect = gc.isenabled() and gc.get_freeze_count() > 0
    print(json.dumps([__name__, sys.argv[1:], importlib.util.find_spec("bitsandbytes") is None, can_collect]))
    try:
        import bitsandbytes
    except ModuleNotFoundError:
        sys.exit(7)
assert not gc.isenabled()
"""


@pytest.mark.parametrize("name", ["looks_for_it", "package_of.looks_for_it"])
def test_a_module_runs_as_a_program_without_bitsandbytes_and_scipy(tmp_path: Path, name: str) -> None:
    file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", *unquantized.command(name), "one", "--two"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ('["__main__", ["one", "--two"], true, true]\n', 7), done.stderr
    assert done.stderr == ""
