"""A warm start by `echo-hub sft`: the base, fine-tuned on demonstrations.

Demonstrations of Knights & Knaves come from the base's own teacher, without errors. None is of a held-out problem.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.learning.virtual_run import Learning, Point
from benchmarks.papers.bases import accuracy_of_base
from benchmarks.papers.cases import Case
from echo_hub.lifecycle.sft import finetune, prepare
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.scoring.problems import Problems
from scripts.small_base.lessons import Knights

Adapter = Mapping[str, NDArray[np.float32]]
"""Weights by PEFT's names."""


def run_finetuned(case: Case, seed: int) -> tuple[list[Point], Adapter]:
    """Fine-tune. Returns the points before and after, and the adapter."""
    assert case.sft is not None, "the case says how"
    config = case.config(seed)
    learning = Learning(config)
    learning.note(reward=None, staleness=0.0, accuracy=accuracy_of_base(config, learning.accuracy))
    with tempfile.TemporaryDirectory(prefix="echo-papers-") as scratch:
        run, file = RunDirectory(Path(scratch) / "run"), Path(scratch) / "demonstrations.jsonl"
        make_run(run, config)
        lines = demonstrations(learning.problems, case.demonstrations, seed)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        prepared = prepare(run, config, file, case.sft)
        done = finetune(prepared, anew=False, told=lambda progress: None, stopping=lambda: False)
        assert done is not None, "fine-tuning is not stopped"
        weights = learning.policy.read_adapter(done.adapter)
    learning.policy.set_adapter(weights)
    learning.note(reward=None, staleness=0.0)
    return learning.points, {name: weight.numpy() for name, weight in weights.items()}


def demonstrations(problems: Problems, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Make the lines of a file for `echo-hub sft`."""
    heldout = {problems.codec.text(prompt_ids) for prompt_ids in problems.heldout_prompt_ids()}
    rng, teacher = random.Random(seed), Knights()
    while count:
        lesson = teacher(rng, 0.0)
        if lesson.prompt not in heldout:
            yield {"prompt": lesson.prompt, "completion": lesson.completion}
            count -= 1
