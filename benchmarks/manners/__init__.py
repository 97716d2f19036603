"""Manners of a node (how it yields to its owner): time to yield, slowdown of other programs, cost at rest and of the
cage.

A yield begins with the owner's command or a sensor's news, and ends when every thread of the engine is stopped or gone.
Lost tokens are tokens of returned rollouts that the engine had sampled and the node had not sent. Tokens of the
interrupted step are counted separately: one per rollout, two per new rollout. A slowdown is the time of a program next
to a node with default settings, over its time next to the same node while paused; both are measured in turns. At each
level of the schedule, the share of the processor's time that a bare engine uses is measured. If there is a wheelhouse
(a directory of wheels), the time of a new installation is measured, and the time to its first rollout. The cage is the
engine's sandbox.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.manners import beside, caged, installed, levels, yielding
from benchmarks.manners.scene import Engine, Models, made_in
from benchmarks.manners.yielding import News

DESCRIPTION: Final = "Time until a node yields to its owner, and the share of the machine that it takes"
ENGINES: Final = (
    Engine("llama_cpp", "small"),
    Engine("llama_cpp", "0.6B"),
    Engine("torch", "small"),
    Engine("torch", "0.6B"),
)
CAGED: Final = tuple(engine for engine in ENGINES if engine.model == "small")
"""Engines with short steps, in which the cage's cost shows best."""
PAUSED: Final = "paused"
INSTALLED: Final = "installed from a wheelhouse"


def _yields(engine: Engine, news: News) -> str:
    return f"yield, {engine.backend}, {engine.model}, {news}"


def _beside(engine: Engine) -> str:
    return f"beside its owner, {engine.backend}, {engine.model}"


def _caged(engine: Engine) -> str:
    return f"caged, {engine.backend}, {engine.model}"


def _levels(engine: Engine) -> str:
    return f"levels, {engine.backend}, {engine.model}"


def plan() -> list[Planned]:
    yields = [Planned(name=_yields(engine, news), seconds=60) for engine in ENGINES for news in get_args(News)]
    slowdowns = [Planned(name=_beside(engine), seconds=130) for engine in ENGINES]
    cages = [Planned(name=_caged(engine), seconds=130) for engine in CAGED]
    new = Planned(name=INSTALLED, seconds=60, lacks=installed.lacks())
    shares = [Planned(name=_levels(engine), seconds=40) for engine in ENGINES]
    return [*yields, *slowdowns, *cages, *shares, Planned(name=PAUSED, seconds=60), new]


def measure(seed: int, progress: Progress) -> Measurement:
    rows: list[dict[str, Any]] = []

    def run(name: str, case: Callable[[Path, Models], Coroutine[Any, Any, Mapping[str, Any]]]) -> None:
        if progress.wants(name):
            with tempfile.TemporaryDirectory(prefix="echo-manners-") as scratch:
                figures = asyncio.run(case(Path(scratch), models))
            rows.append({"case": name, **figures})
            progress.done(name, figures)

    with tempfile.TemporaryDirectory(prefix="echo-models-") as directory:
        models = made_in(Path(directory), seed)
        for engine in ENGINES:
            for news in get_args(News):
                run(_yields(engine, news), partial(yielding.measure, engine=engine, news=news, progress=progress))
        for engine in ENGINES:
            run(_beside(engine), partial(beside.measure, engine=engine, progress=progress))
        for engine in CAGED:
            run(_caged(engine), partial(caged.measure, engine=engine, progress=progress))
        for engine in ENGINES:
            run(_levels(engine), partial(levels.measure, engine=engine))
        run(PAUSED, partial(beside.measure_paused, model=ENGINES[0].model))
        run(INSTALLED, partial(installed.measure, model=ENGINES[0].model))
    return Measurement(headline=_headline(rows), rows=rows)


def _headline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    worst = {
        "yield_ms_p99": ("yield_ms_p99",),
        "resume_s": ("resume_s_worst",),
        "tokens_lost_per_pause": ("tokens_lost_per_pause",),
        "owner_slowdown": ("owner_slowdown_1", "owner_slowdown_all"),
        "share_over_level": ("share_over_level",),
        "idle_cpu_share": ("idle_cpu_share",),
        "idle_rss_mb": ("idle_rss_mb",),
        "install_s": ("install_s",),
        "join_to_first_rollout_s": ("join_to_first_rollout_s",),
    }
    found = {name: [row[key] for row in rows for key in keys if key in row] for name, keys in worst.items()}
    caged_speeds = [row["caged_speed"] for row in rows if "caged_speed" in row]
    return {
        **{name: max(values, default=None) for name, values in found.items()},
        "caged_speed": min(caged_speeds, default=None),
    }
