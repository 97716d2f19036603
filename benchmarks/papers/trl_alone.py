"""GRPOTrainer with the demo's settings and a thread for each core: SEED REPORT [continuous]."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.papers.time_to import ACCURACY, CONTINUOUS_STEPS, EVALUATE_EVERY, MOST_STEPS
from benchmarks.papers.trl_run import Curve, train
from echo_hub.commands.demo_settings import DemoTask, demo_settings
from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig


def main(seed: int, report: Path, *, continuous: bool, steps: int = MOST_STEPS) -> None:
    """Train until the accuracy is reached. Writes the monotonic time of each point of the curve."""
    torch.set_num_threads(os.cpu_count() or 1)
    disable_progress_bar()
    num_steps = CONTINUOUS_STEPS if continuous else steps
    curve = Curve(settings(seed, num_steps), evaluate_every=EVALUATE_EVERY, until=ACCURACY)
    began = time.monotonic()
    train(curve, continuous=continuous)
    trained = len(curve.steps)
    document = {
        "points": [(at_s, point.accuracy) for at_s, point in zip(curve.at_s, curve.points, strict=True)],
        "steps": trained,
        "s_per_step": (time.monotonic() - began) / trained,
    }
    report.write_text(json.dumps(document))


def settings(seed: int, steps: int) -> HubConfig:
    changed: dict[str, dict[str, Any]] = {"run": {"seed": seed, "mode": "colocated"}, "training": {"steps": steps}}
    return load_config(None, demo_settings(DemoTask.ARITHMETIC, changed))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), continuous=sys.argv[3:] == ["continuous"])
