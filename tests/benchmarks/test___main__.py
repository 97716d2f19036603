"""`python -m benchmarks`, as a user types it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import names

ROOT = Path(__file__).parents[2]


def process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_every_benchmark_has_its_two_names() -> None:
    assert names() and "measurement" not in names() and "__main__" not in names()
    for name in names():
        module = importlib.import_module(f"benchmarks.{name}")
        assert module.DESCRIPTION and callable(module.measure)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "Missing argument"),
        (("nonesuch",), "there is no benchmark 'nonesuch'; there is: "),
        (("measurement",), "there is no benchmark 'measurement'"),
        (("__main__",), "there is no benchmark '__main__'"),
        (("demo", "--seed", "-1"), "Invalid value for '--seed'"),
        (("demo", "--seed", "x"), "Invalid value for '--seed'"),
        (("demo", "--json", "no/such/directory/x.json"), "there is no directory"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_measured(arguments: tuple[str, ...], expected: str) -> None:
    result = process(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_the_help_names_every_benchmark() -> None:
    result = process("--help")
    assert result.returncode == 0
    assert [name for name in names() if name not in result.stdout] == []
