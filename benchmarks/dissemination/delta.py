"""Size of a policy version: adapters of a real training run, encoded against the version one step before.

The hub's own learner trains the built-in model on its sums, at each learning rate. The adapters are the learner's
exports in float32, and the same exports rounded to bfloat16.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness.progress import Planned, Progress
from benchmarks.learning.virtual_run import Case, Learning, go_through
from echo_hub.config.sections import HubConfig
from echo_shared import delta
from echo_shared.delta.adapter import CONFIG_FILE, WEIGHTS_FILE

LEARNING_RATES: Final = (1e-5, 1e-4)
STEPS: Final = 40
"""Training steps of a run. The measured delta is the one between the last two versions."""


class Exporting(Learning):
    def __init__(self, config: HubConfig, directory: Path) -> None:
        self.exports: list[Path] = []
        self._directory = directory
        super().__init__(config, evaluate_every=STEPS)

    def publish(self, policy_version: int) -> None:
        super().publish(policy_version)
        if policy_version >= self.config.training.steps - 1:
            self.exports.append(self._directory / f"{policy_version}")
            self.exports[-1].mkdir(parents=True)
            self.policy.save_adapter(self.exports[-1])


def plan() -> list[Planned]:
    return [Planned(name=_name(rate), seconds=25.0) for rate in LEARNING_RATES]


def measure(seed: int, progress: Progress) -> list[dict[str, Any]]:
    """Return a row for each learning rate and dtype. `delta_ratio`: bytes of the delta over those of the raw adapter's
    files. `exact`: True if every file was restored unchanged.
    """
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for rate in LEARNING_RATES:
        if progress.wants(_name(rate)):
            with TemporaryDirectory(prefix="echo-delta-") as scratch:
                sizes = {"steps": STEPS, "learning_rate": rate, "groups_per_step": 16, "group_size": 4}
                case = Case(name=_name(rate), settings={"training": sizes, "evaluation": {"problems": 16}})
                learning = Exporting(case.config(seed), Path(scratch))
                go_through(learning)
                parent, newest = learning.exports
                found = [
                    {"lr": rate, "dtype": "float32", **_coded(newest, parent, Path(scratch))},
                    {"lr": rate, "dtype": "bfloat16", **_coded(_rounded(newest), _rounded(parent), Path(scratch))},
                ]
            rows += found
            progress.done(_name(rate), {f"{row['dtype']} delta_ratio": row["delta_ratio"] for row in found})
    return rows


def _name(rate: float) -> str:
    return f"delta, learning rate {rate:g}"


def _rounded(version: Path) -> Path:
    directory = version.with_name(f"{version.name}-bfloat16")
    directory.mkdir()
    weights = {name: weight.bfloat16() for name, weight in load_file(version / WEIGHTS_FILE).items()}
    save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    shutil.copy(version / CONFIG_FILE, directory)
    return directory


def _coded(version: Path, parent: Path, scratch: Path) -> dict[str, Any]:
    """Encode a version against its parent, decode the delta and compare the result; return the row's figures."""
    payload, decoded = scratch / "payload", scratch / "decoded"
    shutil.rmtree(decoded, ignore_errors=True)
    delta.encode(version, payload, parent=parent)
    files = {path.name: path.read_bytes() for path in version.iterdir()}
    sizes = {name: len(content) for name, content in files.items()}
    with payload.open("rb") as stream:
        delta.decode(stream, decoded, files=sizes, parent=parent)
    exact = files == {path.name: path.read_bytes() for path in decoded.iterdir()}
    return {"delta_ratio": payload.stat().st_size / sum(sizes.values()), "exact": exact}
