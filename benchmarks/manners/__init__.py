"""How a node yields to its owner: time to yield, slowdown of other programs, cost while paused, and cost of the cage
(the engine's sandbox).

A yield begins with the owner's command or a sensor's reading, and ends when every thread of the engine is stopped or
gone. Lost tokens are tokens of returned rollouts that the engine had sampled and the node had not sent.
Tokens of the interrupted step are counted separately: one per rollout, two per new rollout. A slowdown is the time of a
program next to a node with default settings, divided by its time next to the same node while paused; the two are
measured alternately. At each level of the node's schedule, a bare engine runs, and its share of the processor's time is
measured. If there is a wheelhouse (a directory of wheels), the time of a new installation is measured, and the time
until its first rollout, with a small base model and with one of 500 MB.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

from benchmarks.harness.progress import Measurement, Planned, Progress, least, most
from benchmarks.manners import beside, engines, installed, yielding
from benchmarks.manners.scene import Engine, Models, made_in
from benchmarks.manners.yielding import News

DESCRIPTION: Final = "Time until a node yields to its owner, and the share of the machine that it takes"
ENGINES: Final = tuple(Engine(backend, model) for backend in ("llama_cpp", "torch") for model in ("small", "0.6B"))
CAGED: Final = tuple(engine for engine in ENGINES if engine.model == "small")
"""Engines with short steps, for which the cage costs most."""
NEWCOMERS: Final = ("small", "500 MB")
"""Base models with which the time of a new installation, until its first rollout, is measured."""

Case = Callable[[Path, Models, Progress], Coroutine[Any, Any, Mapping[str, Any]]]


def _cases() -> Iterator[tuple[Planned, Case]]:
    for engine in ENGINES:
        for news in get_args(News):
            name = f"yield, {engine.backend}, {engine.model}, {news}"
            yield Planned(name=name, seconds=60), partial(yielding.measure, engine=engine, news=news)
    for engine in ENGINES:
        name = f"beside its owner, {engine.backend}, {engine.model}"
        yield Planned(name=name, seconds=130), partial(beside.measure, engine=engine)
    for engine in CAGED:
        name = f"caged, {engine.backend}, {engine.model}"
        yield Planned(name=name, seconds=130), partial(engines.measure_cage, engine=engine)
    for engine in ENGINES:
        name = f"levels, {engine.backend}, {engine.model}"
        yield Planned(name=name, seconds=40), partial(engines.measure_levels, engine=engine)
    yield Planned(name="paused", seconds=60), partial(beside.measure_paused, model="small")
    for model in NEWCOMERS:
        planned = Planned(name=f"installed from a wheelhouse, {model}", seconds=60, lacks=installed.lacks())
        yield planned, partial(installed.measure, model=model)


def plan() -> list[Planned]:
    return [planned for planned, _ in _cases()]


def measure(seed: int, progress: Progress) -> Measurement:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="echo-models-") as directory:
        models = made_in(Path(directory), seed)
        for planned, case in _cases():
            if progress.wants(planned.name):
                with tempfile.TemporaryDirectory(prefix="echo-manners-") as scratch:
                    figures = asyncio.run(case(Path(scratch), models, progress))
                rows.append({"case": planned.name, **figures})
                progress.so_far = Measurement(headline=_headline(rows), rows=rows)
                progress.done(planned.name, figures)
    return Measurement(headline=_headline(rows), rows=rows)


def _headline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    slowdowns = [most(rows, name) for name in ("owner_slowdown_1", "owner_slowdown_all")]
    worst = ("yield_ms_p99", "tokens_lost_per_pause", "share_over_level", "idle_cpu_share", "idle_rss_mb")
    return {
        **{name: most(rows, name) for name in (*worst, "install_s", "join_to_first_rollout_s")},
        "resume_s": most(rows, "resume_s_worst"),
        "owner_slowdown": max((slowdown for slowdown in slowdowns if slowdown is not None), default=None),
        "caged_speed": least(rows, "caged_speed"),
    }
