"""Runs the cases of `garbage_cases` in a process with few objects: each case makes several full collections, which are
slow among the million objects of the whole test suite's process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.echo_hub.driving import garbage_cases


def test_every_case_of_garbage_collection_passes() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run([*command, garbage_cases.__file__], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{_num_cases()} passed" in ran.stdout, ran.stdout


def _num_cases() -> int:
    return Path(garbage_cases.__file__).read_text(encoding="utf-8").count("\ndef test_")
