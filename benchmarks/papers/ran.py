"""A run of a case with one seed, in this process: its curve, its steps' metrics, and its time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils.logging import disable_progress_bar

from benchmarks.learning.engines import Draw, NodeEngine, by_policy
from benchmarks.learning.virtual_run import Learning, Point, go_through, scenario_of
from benchmarks.papers.bases import accuracy_of_base
from benchmarks.papers.cases import Case
from echo_hub.run.base_model import resolve_base
from echo_hub.simulator.report import report_of
from echo_hub.simulator.scenario import Scenario

FAR_NODES: Final = 8
FAR_NODE_S: Final = 0.5
"""Time of a rollout on a far node; a step takes a second. Eight nodes of width 32 draw four times what the learner
needs, so that only the distance can hold it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Results of a run."""

    points: list[Point]
    steps: list[Mapping[str, float]]
    """Metrics of each step; empty for an untrained base."""
    utilisation: float | None
    """Share of virtual time in which the learner trains; None without virtual time."""
    seconds: float
    adapter: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Adapter of a warm start, by PEFT's names."""

    @property
    def accuracy(self) -> float:
        """Greedy held-out accuracy at the end."""
        return self.points[-1].accuracy

    def steps_to(self, accuracy: float, *, evaluate_every: int) -> float:
        """Steps until the curve reaches an accuracy, linear between its points; infinite if it never does."""
        for number, (before, after) in enumerate(zip(self.points, self.points[1:], strict=False)):
            if after.accuracy >= accuracy:
                risen = after.accuracy - before.accuracy
                share = 0.0 if risen <= 0 else max(0.0, (accuracy - before.accuracy) / risen)
                return evaluate_every * (number + share)
        return float("inf")


def carry_out(case: Case, seed: int, start: Ran | None = None) -> Ran:
    """Carry out a case with one thread. `start` is the result that the case begins with."""
    torch.set_num_threads(1)
    disable_progress_bar()
    began = time.perf_counter()
    adapter: Mapping[str, NDArray[np.float32]] = {}
    match case.runner:
        case "trl":
            from benchmarks.papers.trl_run import run_trl

            points, steps = run_trl(case, seed)
        case "episodes":
            from benchmarks.papers.episodes import run_episodes

            points, steps = run_episodes(case, seed)
        case "untrained":
            learning = Learning(case.config(seed))
            learning.note(reward=None, staleness=0.0, accuracy=accuracy_of_base(learning.config, learning.accuracy))
            points, steps = learning.points, []
        case "finetuned":
            from benchmarks.papers.finetuned import run_finetuned

            steps = []
            points, adapter = run_finetuned(case, seed)
        case "virtual":
            return _in_virtual_time(case, seed, start)
    seconds = time.perf_counter() - began
    return Ran(points=points, steps=steps, utilisation=None, seconds=seconds, adapter=adapter)


def _in_virtual_time(case: Case, seed: int, start: Ran | None) -> Ran:
    began = time.perf_counter()
    config = case.config(seed)
    with _drawing(case, resolve_base(config.model.base)) as draw:
        learning = Learning(config, lambda node_id: draw, evaluate_every=case.evaluate_every)
        if start is not None:
            learning.begin_with(start.adapter)
        world = go_through(
            learning,
            scenario_of(config) if case.delay_s is None else _far_away(case, seed),
            first_accuracy=accuracy_of_base(config, learning.accuracy) if start is None else start.accuracy,
        )
    return Ran(
        points=learning.points,
        steps=learning.metrics,
        utilisation=report_of(world).utilisation,
        seconds=time.perf_counter() - began,
    )


@contextmanager
def _drawing(case: Case, base_dir: Path) -> Iterator[Draw]:
    with ExitStack() as stack:
        if case.precision == "policy":
            yield by_policy
            return
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo-papers-")))
        engine = NodeEngine("llama_cpp", case.precision, base_dir=base_dir, scratch=scratch)
        stack.callback(engine.close)
        yield engine


def _far_away(case: Case, seed: int) -> Scenario:
    """Nodes at a distance of `delay_s`, and a learner whose step takes a second."""
    ideal = scenario_of(case.config(seed)).model_dump()
    nodes = {"count": FAR_NODES, "width": 32, "s_per_token": FAR_NODE_S, "delay_s": case.delay_s}
    steps = ideal["training"]["steps"]
    return Scenario.model_validate(
        {
            **ideal,
            "nodes": {**ideal["nodes"], **nodes},
            "measuring": {"warm_up_steps": steps // 8, "limit_s": 100.0 * steps},
        }
    )
