"""Does the runs that the wanted tables need, in single-threaded processes: in the order of the tables, seed by seed."""

from __future__ import annotations

import json
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils.logging import disable_progress_bar

from benchmarks.harness.pool import pool
from benchmarks.harness.site import Settings
from benchmarks.learning import virtual_run
from benchmarks.learning.virtual_run import Draw, Learning, NodeEngine, Point, by_policy, go_through, scenario_of, stale
from echo_hub.learner.sft import SftProgress
from echo_hub.learner.sft_plan import SftSettings
from echo_hub.lifecycle.sft import finetune, prepare
from echo_hub.run.base_files import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.scoring.problems import Problems
from echo_hub.simulator.scenario import Scenario
from scripts.small_base.lessons import Knights

SEEDS: Final = 3
MOST_SEEDS: Final = 6
"""Maximum number of seeds of a table. `--seed N` uses the seeds from N times this number on, so that different N never
share a seed.
"""
STEPS: Final = 40
GROUPS: Final = 16

Runner = Literal["virtual", "episodes", "trl", "untrained", "finetuned"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Case(virtual_run.Case):
    """A configuration for training, and the program that trains it. A table compares several cases."""

    sizes: ClassVar[Settings] = {
        "training": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": 8},
        "evaluation": {"problems": 512},
    }
    runner: Runner = "virtual"
    """virtual: the hub's own coordinator and learner in virtual time. episodes: the learner samples for itself, with
    games of several turns. trl: GRPOTrainer. untrained: the base is only evaluated. finetuned: `echo-hub sft`.
    """
    start: Case | None = None
    """The `finetuned` case whose adapter this case starts from; None: the base model."""
    demonstrations: int = 0
    sft: SftSettings | None = None
    same_draws: bool = False
    """True if TRL's trainer begins with the hub's own adapter, and samples with the hub's sampler and seeds."""
    precision: str = "policy"
    """Sampler: `policy` for the learner's own model, otherwise the precision of the node's llama.cpp engine."""
    delay_s: float | None = None
    """One-way delay between hub and nodes in seconds. None: nodes and messages take no time at all."""
    evaluate_every: int = 10
    seconds: float = 10.0

    def runs(self, seeds: int) -> int:
        """Return the number of different runs for this many seeds: untrained and fine-tuned cases ignore the seed and
        have 1 run.
        """
        return 1 if self.runner in ("untrained", "finetuned") else seeds


COLOCATED: Final = Case(name="co-located")
SEQUENTIAL: Final = Case(name="sequential", settings={"run": {"mode": "sequential"}})
ASYNC: Final = Case(name="async, S = 2", settings=stale(2))


FAR_NODES: Final = 8
FAR_NODE_S: Final = 0.5
"""Seconds per rollout on a node with a delay; a training step takes one second. Eight such nodes of width 32 sample
four times what the learner needs, so that only the delay can slow the learner down.
"""

Adapter = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    points: list[Point]
    steps: list[Mapping[str, float]] = field(default_factory=list)
    """The learner's metrics of each step; empty for an untrained base."""
    adapter: Adapter = field(default_factory=dict)
    """Adapter at the end of a fine-tuning case; empty for other cases."""

    @property
    def accuracy(self) -> float:
        """Return the greedy held-out accuracy after the last step."""
        return self.points[-1].accuracy

    def steps_to(self, accuracy: float, *, evaluate_every: int) -> float:
        """Return the number of steps until the curve reaches this accuracy, interpolated between its points; infinite
        if it never does.
        """
        for number, (before, after) in enumerate(zip(self.points, self.points[1:], strict=False)):
            if after.accuracy >= accuracy:
                risen = after.accuracy - before.accuracy
                share = 0.0 if risen <= 0 else max(0.0, (accuracy - before.accuracy) / risen)
                return evaluate_every * (number + share)
        return float("inf")


Found = Mapping[Case, Sequence[Ran]]
"""The results of a table: for each case, one per seed."""
Wanted = tuple[Sequence[Case], int]
"""What a table needs: its cases, and its number of seeds."""


def runs_of(wanted: Wanted) -> list[tuple[Case, int]]:
    """Return the runs of a table as pairs of a case and a seed number, which counts from 0 for each case."""
    cases, seeds = wanted
    return [(case, number) for number in range(seeds) for case in cases if number < case.runs(seeds)]


def carry_out_all(tables: Sequence[Wanted], seed: int, done: Callable[[int, Found], object]) -> None:
    """Do all runs. When the last run of a table is finished, call `done` with the table's number and results."""
    wanted = list(dict.fromkeys(run for table in tables for run in runs_of(table)))
    if not wanted:
        return
    ran: dict[tuple[Case, int], Ran] = {}
    waiting = {number: set(runs_of(table)) for number, table in enumerate(tables)}
    with pool(len(wanted)) as processes:
        running: dict[Future[Ran], tuple[Case, int]] = {}

        def begin(start: Case | None) -> None:
            """Start the runs of all cases that start from the case `start`; None: from a base model."""
            first = None if start is None else ran[start, 0]
            for case, number in wanted:
                if case.start is start:
                    running[processes.submit(carry_out, case, MOST_SEEDS * seed + number, first)] = case, number

        begin(None)
        try:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    one = running.pop(future)
                    ran[one] = future.result()
                    if one[1] == 0:
                        begin(one[0])
                    for number, missing in list(waiting.items()):
                        missing.discard(one)
                        if not missing:
                            del waiting[number]
                            done(number, _found(tables[number], ran))
        except BaseException:
            processes.shutdown(cancel_futures=True)
            raise
    assert not waiting, "a case begins with one that is in no table"


def _found(table: Wanted, ran: Mapping[tuple[Case, int], Ran]) -> Found:
    cases, seeds = table
    return {case: [ran[case, number % case.runs(seeds)] for number in range(seeds)] for case in cases}


def carry_out(case: Case, seed: int, start: Ran | None = None) -> Ran:
    """Do a run with one thread in this process. `start` is the result of the case that this case starts from."""
    torch.set_num_threads(1)
    disable_progress_bar()
    match case.runner:
        case "trl":
            from benchmarks.papers.trl_run import run_trl

            points, steps = run_trl(case, seed)
            return Ran(points=points, steps=steps)
        case "episodes":
            from benchmarks.papers.episodes import run_episodes

            points, steps = run_episodes(case, seed)
            return Ran(points=points, steps=steps)
        case "untrained":
            learning = Learning(case.config(seed))
            learning.note(reward=None, staleness=0.0)
            return Ran(points=learning.points)
        case "finetuned":
            return _finetuned(case, seed)
        case "virtual":
            return _in_virtual_time(case, seed, start)


def _in_virtual_time(case: Case, seed: int, start: Ran | None) -> Ran:
    config = case.config(seed)
    with _drawing(case, resolve_base(config.model.base)) as draw:
        learning = Learning(config, lambda node_id: draw, evaluate_every=case.evaluate_every)
        if start is not None:
            learning.begin_with(start.adapter)
        go_through(learning, scenario_of(config) if case.delay_s is None else _far_away(case, seed))
    return Ran(points=learning.points, steps=learning.metrics)


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
    """Return a scenario whose nodes have a delay of `delay_s`, and whose learner takes a second per step."""
    ideal = scenario_of(case.config(seed)).model_dump()
    nodes = {"count": FAR_NODES, "width": 32, "s_per_token": FAR_NODE_S, "delay_s": case.delay_s}
    limit_s = 100.0 * ideal["training"]["steps"]
    return Scenario.model_validate(
        {**ideal, "nodes": {**ideal["nodes"], **nodes}, "measuring": {"warm_up_steps": 0, "limit_s": limit_s}}
    )


class _Unwatched:
    def tell(self, progress: SftProgress) -> None:
        """Ignore the progress that the fine-tuning reports: the benchmark shows its own."""


def _finetuned(case: Case, seed: int) -> Ran:
    """Fine-tune the base with `echo-hub sft`. The curve has two points: before and after fine-tuning."""
    assert case.sft is not None, "the case says how"
    config = case.config(seed)
    learning = Learning(config)
    learning.note(reward=None, staleness=0.0)
    with tempfile.TemporaryDirectory(prefix="echo-papers-") as scratch:
        run, file = RunDirectory(Path(scratch) / "run"), Path(scratch) / "demonstrations.jsonl"
        make_run(run, config)
        lines = demonstrations(learning.problems, case.demonstrations, seed)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        prepared = prepare(run, config, file, case.sft)
        done = finetune(prepared, anew=False, watcher=_Unwatched(), stop=threading.Event())
        assert done is not None, "fine-tuning is not stopped"
        weights = learning.policy.read_adapter(done.adapter)
    learning.policy.set_adapter(weights)
    learning.note(reward=None, staleness=0.0)
    return Ran(points=learning.points, adapter={name: weight.numpy() for name, weight in weights.items()})


def demonstrations(problems: Problems, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield lines of a file for `echo-hub sft`: puzzles of Knights & Knaves with the solutions of the teacher that
    trained the built-in model, without mistakes. Held-out problems are excluded.
    """
    heldout = {problems.codec.text(prompt_ids) for prompt_ids in problems.heldout_prompt_ids()}
    rng, teacher = random.Random(seed), Knights()
    while count:
        lesson = teacher(rng, 0.0)
        if lesson.prompt not in heldout:
            yield {"prompt": lesson.prompt, "completion": lesson.completion}
            count -= 1
