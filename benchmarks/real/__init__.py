"""Training and export of a known language model on this machine: SmolLM2-135M-Instruct.

- `demo`: `echo-hub demo --base smollm2` with its default settings: a hub, a node with llama.cpp and one with PyTorch.
  `accuracy_before` and `accuracy_after` are measured on 256 held-out problems with greedy sampling. `learner_step_s`,
  `delta_bytes` (of a published version) and `mismatch_kl` are medians of the steps; `peak_gb` is the memory of all
  processes together.
- `merged`: `echo-hub export --merged`, then plain transformers. `gguf q8_0`: `echo-hub export --gguf q8_0`, then
  llama-cpp-python's `Llama`. Both answer the same problems in a process that imports nothing of Echo (`outside`).
- `bundle`: `echo-hub bundle` and `echo-hub check-bundle` on the run, and on copies with planted forgeries: see
  `bundled`.
- One case for each engine: see `engines`.

`false_quarantines` is the sum over all cases.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.demo import run_demo
from benchmarks.harness import real_model
from benchmarks.harness.engine import lacks
from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.harness.site import memory_bytes, read_rows
from benchmarks.real import bundled
from benchmarks.real.engines import ENGINES, TrainedRun, measured
from echo_hub.learner.policy import Policy
from echo_hub.run.directory import RunDirectory
from echo_hub.verify.worker import Examiner
from echo_shared.records.step_figures import GAP_S, MISMATCH_KL, TRAIN_S

DESCRIPTION: Final = "SmolLM2-135M-Instruct, trained by the demo, and used by programs that know nothing of Echo"
DEMO: Final = "demo"
MERGED: Final = "merged"
GGUF: Final = "gguf q8_0"
BUNDLE: Final = "bundle"
FALSE_QUARANTINES: Final = "false_quarantines"
SAMPLED_EVERY_S: Final = 5.0
_OUTSIDE: Final = Path(__file__).with_name("outside.py")
_TIMEOUT_S: Final = 900


def plan() -> list[Planned]:
    missing = real_model.lacks()
    llama = missing or lacks("llama_cpp", "q8_0")
    return [
        Planned(name=DEMO, seconds=700, lacks=missing),
        Planned(name=MERGED, seconds=90, lacks=missing),
        Planned(name=GGUF, seconds=60, lacks=llama),
        Planned(name=BUNDLE, seconds=180, lacks=missing),
        *(
            Planned(name=name, seconds=60, lacks=missing or lacks(engine.backend, engine.precision))
            for name, engine in ENGINES.items()
        ),
    ]


def measure(seed: int, progress: Progress) -> Measurement:
    """Measure the wanted cases. The demo always runs, because the other cases need the model that it trains."""
    headline: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []

    def done(name: str, figures: dict[str, Any], row: dict[str, Any] | None = None) -> None:
        headline.update(figures)
        rows.append({"case": name, **(figures if row is None else row)})
        progress.so_far = Measurement(headline=dict(headline), rows=list(rows))
        if progress.wants(name):
            progress.done(name, figures if row is None else row)

    if not any(progress.wants(planned.name) for planned in plan()):
        return Measurement(headline=headline, rows=rows)
    with tempfile.TemporaryDirectory(prefix="echo-real-") as name:
        scratch = Path(name)
        done(DEMO, _demo(scratch, seed))
        trained = TrainedRun(RunDirectory(scratch / "run"))
        problems = _problems(trained, scratch / "problems.json")
        if progress.wants(MERGED):
            bundled.echo_hub("export", scratch / "run", scratch / "merged", "--merged")
            done(MERGED, {"accuracy_merged_transformers": _outside("transformers", scratch / "merged", problems)})
        if progress.wants(GGUF):
            bundled.echo_hub("export", scratch / "run", scratch / "gguf", "--gguf", "q8_0")
            (file,) = (scratch / "gguf").glob("*.gguf")
            done(GGUF, {"accuracy_gguf_q8": _outside("llama_cpp", file, problems)})
        wanted = {name: engine for name, engine in ENGINES.items() if progress.wants(name)}
        if wanted or progress.wants(BUNDLE):
            policy = Policy.load(trained.settings)
        if progress.wants(BUNDLE):
            row = bundled.measured(trained, policy, scratch / "bundle", seed)
            done(BUNDLE, {name: row[name] for name in bundled.HEADLINE}, row)
        if wanted:
            examiner = Examiner.open({"settings": trained.settings.model_dump(mode="json"), "kept": 2})
        for name, engine in wanted.items():
            found = measured(trained, engine, scratch / "engines" / name, seed, policy, examiner)
            convicted = headline[FALSE_QUARANTINES] + found[FALSE_QUARANTINES]
            figures = {f"{key}: {name}": found[key] for key in ("tokens_per_s", "mismatch_kl", "engine_gb")}
            done(name, {**figures, FALSE_QUARANTINES: convicted}, found)
    return Measurement(headline=headline, rows=rows)


def _demo(scratch: Path, seed: int) -> dict[str, Any]:
    with _memory_of_children() as memory:
        report = run_demo(scratch, seed, "--base", "smollm2")
    names = ("accuracy_before", "accuracy_after", "seconds", "policy_versions", "trained")
    gain = report["accuracy_after"] - report["accuracy_before"]
    peak_gb = max(memory) / 1e9
    return {
        **{name: report[name] for name in names},
        "peak_gb": peak_gb,
        "gain": gain,
        **figures_of_run(scratch / "run"),
    }


@contextmanager
def _memory_of_children() -> Iterator[list[int]]:
    """While the block runs, append the memory of this process's descendants, in bytes, to the list."""
    found, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLED_EVERY_S):
            found.append(memory_bytes(psutil.Process().children(recursive=True)))

    thread = threading.Thread(target=watch, name="memory", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def figures_of_run(run: Path) -> dict[str, Any]:
    """Return figures of a finished run from its database."""
    steps = read_rows(run, "SELECT mean_reward, metrics FROM steps WHERE trained_at > 0 ORDER BY step")
    sizes = read_rows(run, "SELECT payload_bytes FROM versions ORDER BY policy_version")
    checks = "SELECT coalesce(sum(num_checked), 0), count(*) FILTER (WHERE state = 'quarantined') FROM trust"
    ((checked, quarantined),) = read_rows(run, checks)
    metrics = [json.loads(of_step) for _, of_step in steps]
    return {
        "learner_step_s": _median(of_step.get(TRAIN_S.key) for of_step in metrics),
        "learner_wait_s": _median(of_step.get(GAP_S.key) for of_step in metrics),
        "mismatch_kl": _median(of_step.get(MISMATCH_KL.key) for of_step in metrics),
        "delta_bytes": _median(size or None for (size,) in sizes[2:]),
        "checked": checked,
        FALSE_QUARANTINES: quarantined,
        "rewards": [reward for reward, _ in steps],
    }


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _problems(trained: TrainedRun, file: Path) -> Path:
    """Write the run's held-out problems to `file`, in the format that the program `outside` reads."""
    config = trained.config
    found = [trained.problems.heldout_problem(number)[0] for number in range(config.evaluation.problems)]
    document = {
        "system_prompt": config.task.system_prompt,
        "prompt_suffix": config.task.prompt_suffix,
        "max_tokens": config.sampling.max_tokens,
        "problems": [(problem.prompt, problem.metadata["answer"]) for problem in found],
    }
    file.write_text(json.dumps(document))
    return file


def _outside(program: str, model: Path, problems: Path) -> float:
    command = [sys.executable, str(_OUTSIDE), program, str(model), str(problems)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=_TIMEOUT_S).stdout
    return float(json.loads(said.splitlines()[-1])["accuracy"])
