"""Where scoring processes run: beside the hub, or in a Ray cluster. It is the same program, with the same limits."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from echo_hub.cluster.actor import PID
from echo_hub.cluster.link import RayLink
from echo_hub.cluster.parcel import PACKAGES, Parcel
from echo_hub.config.sections import HubConfig
from echo_shared.child import Frame
from echo_shared.supervised import NO_HEARTBEAT, Command, SupervisedChild

GRACE_S: Final = 5.0
"""Seconds beyond the time limit, which a process keeps by itself where it can, until it is ended from outside."""
_LIMITS: Final = replace(NO_HEARTBEAT, ending_s=GRACE_S)
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_NEEDED: Final = ("run", "model", "task", "reward", "sampling", "evaluation")
"""Sections that a scoring process reads. The others hold passwords and tokens, and stay here."""
_KIND: Final = "scorer"
_OF_TOKENIZERS: Final = ("*.json", "*.jinja")


class ScoringProcess(Protocol):
    """What a pool drives: a `SupervisedChild`, or a `RayChild`."""

    ready: Frame

    async def open(self, opening: Mapping[str, object]) -> None: ...
    async def send(self, frame: Mapping[str, object]) -> None: ...
    async def receive(self, *, within_s: float = ...) -> Frame: ...
    def kill(self) -> None: ...
    async def stop(self, *, timeout_s: float = ...) -> None: ...


class Processes(Protocol):
    """Starts them."""

    @property
    def opening(self) -> Mapping[str, object]:
        """Settings and directory of the base model, as such a process is to be given them."""

    @property
    def absence(self) -> str:
        """Why none works, where they are waited for; empty = nothing is amiss."""

    async def spawn(self, number: int) -> ScoringProcess:
        """One that waits for its opening frame. Raises ChildExited when it cannot be started."""


def answer_s(config: HubConfig, *, width: int) -> float:
    """For one answer of a process that has so many calls at once, until it is ended from outside."""
    return config.task.scorer_timeout_s * (1 if width == 1 else 2) + GRACE_S


def processes_of(config: HubConfig, *, base_dir: Path, logs: Path, width: int, cluster: RayLink | None) -> Processes:
    """As `scoring.engine` says."""
    if config.scoring.engine == "local":
        return LocalProcesses(config, base_dir=base_dir, logs=logs)
    assert cluster is not None
    _, opening = parcel_of(config, base_dir)
    return RayProcesses(cluster, opening, logs=logs, answer_s=answer_s(config, width=width))


class LocalProcesses:
    """Beside the hub."""

    _GUARDED: Final = sys.platform == "linux"
    """Each process has a warden, which must not be killed before it has ended what is below it."""

    def __init__(self, config: HubConfig, *, base_dir: Path, logs: Path) -> None:
        self.opening: Mapping[str, object] = {"config": config.model_dump(mode="json"), "base_dir": str(base_dir)}
        self.absence = ""
        self._logs = logs

    async def spawn(self, number: int) -> SupervisedChild:
        """See `Processes`."""
        command = _command(self._logs, number, parent=str(os.getpid()) if self._GUARDED else "")
        return await SupervisedChild.spawn(command, _LIMITS)


class RayProcesses:
    """Each below an actor of its own."""

    def __init__(self, link: RayLink, opening: Mapping[str, object], *, logs: Path, answer_s: float) -> None:
        self.opening = opening
        self._link = link
        self._logs = logs
        self._answer_s = answer_s

    @property
    def absence(self) -> str:
        """See `Processes`."""
        return self._link.absence(_KIND)

    async def spawn(self, number: int) -> ScoringProcess:
        """See `Processes`. Waits for the cluster."""
        return await self._link.spawn(
            _KIND,
            f"{_KIND}-{number}",
            _command(self._logs, number, parent=PID),
            answer_s=self._answer_s,
            counted="arguments",
            ending_s=GRACE_S,
        )


def _command(logs: Path, number: int, *, parent: str) -> Command:
    """`parent`: the id of the process that starts it, where it is to have a warden."""
    return Command(
        module="echo_hub.scoring.warden" if parent else "echo_hub.scoring.worker",
        arguments=(parent,) if parent else (),
        name="scoring",
        log=logs / f"scorer-{number}.log",
        env=_ENVIRONMENT,
        ends_its_own=bool(parent),
    )


def parcel_of(config: HubConfig, base_dir: Path) -> tuple[Parcel, Mapping[str, object]]:
    """The files that a scoring process needs on a machine that has nothing of the run, and what `Processes.opening`
    is there, with the paths that those files have then."""
    contents = {f"base/{file.name}": file for pattern in _OF_TOKENIZERS for file in base_dir.glob(pattern)}
    if config.ray.working_dir:
        contents["work"] = Path(config.ray.working_dir).expanduser()
    sent = config.model_dump(mode="json", include=set(_NEEDED))
    for task in (sent["task"], *sent["task"]["mixture"].values()):
        kind, _, place = task["name"].partition(":")
        if kind == "jsonl":
            for name in ("path", "heldout_path"):
                if path := task["options"].get(name):
                    file = Path(path).expanduser()
                    in_parcel = f"files/{len(contents)}/{file.name}"
                    contents[in_parcel] = file
                    task["options"][name] = f"../{in_parcel}"
        elif kind == "python":
            contents |= _module(place.partition(":")[0].partition(".")[0])
    return Parcel(contents=contents), {"config": sent, "base_dir": "../base"}


def _module(name: str) -> dict[str, Path]:
    """A module by its place in the parcel, if it is the user's own: what is installed has to be installed there too."""
    found = importlib.util.find_spec(name) if name not in PACKAGES else None
    if found is None or found.origin is None:
        return {}
    file = Path(found.origin).resolve()
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    if not file.is_file() or any(file.is_relative_to(path) for path in installed):
        return {}
    if found.submodule_search_locations:
        return {f"modules/{name}": file.parent}
    return {f"modules/{file.name}": file}


def where(config: HubConfig) -> str:
    """For people: where scoring runs."""
    count = config.task.scorer_processes
    if config.scoring.engine == "local":
        return f"{count} {'process' if count == 1 else 'processes'} beside the hub"
    actors = f"{count} Ray {'actor' if count == 1 else 'actors'} at {config.ray.address}"
    return f"{actors}, {config.ray.set_aside(_KIND)} each"
