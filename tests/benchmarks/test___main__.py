from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.__main__ import main, names
from benchmarks.harness import real_model

ROOT = Path(__file__).parents[2]
CPUINFO = Path("/proc/cpuinfo")
HAS_AVX2 = CPUINFO.exists() and " avx2 " in CPUINFO.read_text()
AVX2_ALONE = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
SHORT, NEXT = "grid, sigma 0.5, S = 4, step 1 s", "grid, sigma 1, S = 4, step 1 s"
"""Names of two cases of the benchmark `simulate` that take a few seconds each."""
PLAN = """
import importlib, sys
from echo_shared.process.importing import do_without
do_without("bitsandbytes")
for name in sys.argv[1:]:
    for case in importlib.import_module(f"benchmarks.{name}").plan():
        if "bfloat16" in case.lacks:
            print(case.name)
"""


command = typer.Typer()
command.command()(main)


def process(*arguments: str | Path, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


def test_every_benchmark_defines_its_three_names() -> None:
    assert names() and not {"measurement", "progress", "__main__"} & {*names()}
    for name in names():
        module = importlib.import_module(f"benchmarks.{name}")
        assert module.DESCRIPTION and callable(module.measure)
        planned = module.plan()
        assert planned and len({case.name for case in planned}) == len(planned)
        assert all(case.seconds > 0 for case in planned)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "Missing argument"),
        (("nonesuch",), "there is no benchmark 'nonesuch'; there is: "),
        (("measurement",), "there is no benchmark 'measurement'"),
        (("demo", "--only", "dem"), "there is no case 'dem'; there is: demo"),
        (("__main__",), "there is no benchmark '__main__'"),
        (("demo", "--hours", "2"), "the duration of the benchmark demo cannot be set"),
        (("demo", "--seed", "-1"), "Invalid value for '--seed'"),
        (("demo", "--seed", "x"), "Invalid value for '--seed'"),
        (("demo", "--json", "no/such/directory/x.json"), "there is no directory"),
    ],
)
def test_wrong_usage_is_reported_before_anything_is_measured(arguments: tuple[str, ...], expected: str) -> None:
    result = CliRunner().invoke(command, arguments, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr


def test_the_help_names_every_benchmark() -> None:
    result = process("--help")
    assert result.returncode == 0
    assert [name for name in names() if name not in result.stdout] == []


@pytest.mark.slow
def test_an_interrupted_benchmark_writes_its_results_so_far(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "simulate", "--only", SHORT, "--only", NEXT]
    with subprocess.Popen([*command, "--json", file], cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        assert any(line.startswith(f"[1/2] {SHORT}") for line in run.stderr)
        run.send_signal(signal.SIGINT)
        run.stderr.read()
    assert run.returncode != 0
    document = json.loads(file.read_text())
    assert [row["case"] for row in document["rows"]] == [SHORT] and document["rows"][0].keys() > {"case"}
    assert (document["unfinished"], document["headline"]) == ("KeyboardInterrupt()", {})


@pytest.mark.skipif(not HAS_AVX2, reason="PyTorch cannot be told here that the processor has AVX2 alone")
def test_cases_without_hardware_support_are_left_out_and_reported(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = process("learner", "--only", "100 m*bfloat16", "--json", file, timeout=240, **AVX2_ALONE)
    assert result.returncode == 0, result.stderr
    assert "left out: 100 M parameters, bfloat16: hardware that multiplies bfloat16" in result.stderr
    document = json.loads(file.read_text())
    assert (document["rows"], document["only"]) == ([], ["100 m*bfloat16"])
    assert [one["case"] for one in document["left_out"]] == ["100 M parameters, bfloat16"]
    assert {*document["headline"].values()} == {None}


@pytest.mark.skipif(not HAS_AVX2, reason="PyTorch cannot be told here that the processor has AVX2 alone")
def test_every_benchmark_leaves_out_only_the_cases_that_need_the_hardware() -> None:
    command = [sys.executable, "-c", PLAN, *names()]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **AVX2_ALONE}, capture_output=True, text=True, check=True
    )
    is_real = not real_model.lacks()
    assert run.stdout.splitlines() == [
        *(["prefix torch real bf16"] if is_real else []),
        *(f"speed, mid, torch bf16, width {width}" for width in (1, 8, 32, 64)),
        "agreement, torch bf16",
        "honest, torch bf16",
        "100 M parameters, bfloat16",
        *(["torch bf16", "real, torch bf16, T = 1", "real, torch bf16, T = 0.6"] if is_real else []),
    ]
