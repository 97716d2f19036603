"""Coverage-guided fuzzing of all code that reads bytes from untrusted peers: executions and findings.

Each target (`benchmarks.fuzzing.targets`) runs in a process of its own with atheris and libFuzzer, from valid examples
and from the corpus of the tests. Findings are unexpected errors, runs longer than `SLOW_S`, and memory use above
`MEMORY_MB`. A row contains the bytes of each finding in hexadecimal.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from benchmarks.fuzzing.targets import CHEAP_RUNS, TARGETS
from benchmarks.harness.progress import Measurement, Planned, Progress

DESCRIPTION: Final = "Fuzzing of all code that reads bytes from untrusted peers: executions and findings of each target"
CORPUS: Final = Path(__file__).parents[1] / "tests" / "benchmarks" / "fuzzing" / "corpus"
"""One directory for each target, with inputs that reached new code or caused a finding."""
SLOW_S: Final = 30
"""An input that takes longer than this many seconds is a finding. The limit is high because the machine may be busy."""
MEMORY_MB: Final = 1_024
_DONE: Final = re.compile(r"Done (\d+) runs")
_COVERAGE: Final = re.compile(r"cov: (\d+)")
_MEMORY: Final = Path("/dev/shm")
_RUNS_PER_S: Final = 25_000
_DEAR_RUNS_PER_S: Final = 4_000


def plan() -> list[Planned]:
    lacks = "" if importlib.util.find_spec("atheris") else "atheris is not installed (on Linux alone: extra benchmarks)"
    return [
        Planned(
            name=name, seconds=one.runs / (_RUNS_PER_S if one.runs == CHEAP_RUNS else _DEAR_RUNS_PER_S), lacks=lacks
        )
        for name, one in TARGETS.items()
    ]


def measure(seed: int, progress: Progress) -> Measurement:
    wanted = [name for name in TARGETS if progress.wants(name)]
    rows: dict[str, dict[str, Any]] = {}
    memory = _MEMORY if _MEMORY.is_dir() else None
    with (
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
        tempfile.TemporaryDirectory(prefix="echo-fuzz-", dir=memory) as scratch,
    ):
        running = {pool.submit(fuzzed, name, Path(scratch), seed): name for name in wanted}
        for future in as_completed(running):
            name = running[future]
            rows[name] = future.result()
            progress.done(name, {key: rows[name][key] for key in ("runs", "findings")})
    return Measurement(headline=headline(rows), rows=[rows[name] for name in wanted])


def headline(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of all executions and findings, and the smallest number of executions for each kind of
    target.
    """
    cheap = [row["runs"] for name, row in rows.items() if TARGETS[name].runs == CHEAP_RUNS]
    dear = [row["runs"] for name, row in rows.items() if TARGETS[name].runs != CHEAP_RUNS]
    fewest = {"fewest_cheap": cheap, "fewest_dear": dear}
    return {
        "executions": sum(row["runs"] for row in rows.values()),
        "findings": sum(row["findings"] for row in rows.values()),
        **{name: min(runs) for name, runs in fewest.items() if runs},
    }


def fuzzed(name: str, scratch: Path, seed: int, *, child: str = "benchmarks.fuzzing.child") -> dict[str, Any]:
    """Fuzz one target in a process that runs the module `child`; its files are below `scratch`. Return its row."""
    target, own = TARGETS[name], scratch / name.replace(" ", "-")
    new, found = own / "corpus", own / "found"
    for directory in (new, found):
        directory.mkdir(parents=True)
    known = CORPUS / own.name
    options = [f"-runs={target.runs}", f"-timeout={SLOW_S}", f"-rss_limit_mb={MEMORY_MB}", f"-seed={seed + 1}"]
    options += [f"-artifact_prefix={found}/", "-print_final_stats=1"]
    command = [
        sys.executable,
        "-m",
        child,
        name,
        str(new),
        *([str(known)] if known.is_dir() else []),
    ]
    began_at = time.monotonic()
    # Start the process through a small shell: a process inherits its parent's peak memory, and libFuzzer reads that
    # peak.
    process = subprocess.run(
        ["/bin/sh", "-c", '"$@"; exit $?', "sh", *command, *options],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "TMPDIR": str(own)},  # libFuzzer ends the process before it can delete its temporary files.
    )
    done, coverage = _DONE.findall(process.stderr), _COVERAGE.findall(process.stderr)
    findings = list(found.iterdir())
    return {
        "target": name,
        "runs": int(done[-1]) if done else 0,
        "seconds": time.monotonic() - began_at,
        "covered": int(coverage[-1]) if coverage else 0,
        "findings": max(len(findings), int(process.returncode != 0)),
        "first": findings[0].read_bytes()[:400].hex() if findings else "",
        "said": (process.stdout[-2_000:] + process.stderr[-2_000:]) if process.returncode else "",
    }
