"""Start scoring processes on the hub's machine or in a Ray cluster, with the same program and limits."""

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
from echo_shared.process.child import Frame
from echo_shared.process.supervised import NO_HEARTBEAT, Command, SupervisedChild

GRACE_S: Final = 5.0
"""Seconds after a call's time limit at which the hub kills the call's process. Normally the process ends itself at the
limit."""
_LIMITS: Final = replace(NO_HEARTBEAT, ending_s=GRACE_S)
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_NEEDED: Final = ("run", "model", "task", "reward", "sampling", "evaluation")
"""Sections of the settings that a scoring process needs. Other sections are not sent, because they contain passwords
and tokens."""
_KIND: Final = "scorer"
_OF_TOKENIZERS: Final = ("*.json", "*.jinja")


class ScoringProcess(Protocol):
    """A process of the pool: `SupervisedChild` on this machine, `RayChild` in the cluster."""

    ready: Frame

    async def open(self, opening: Mapping[str, object]) -> None: ...
    async def send(self, frame: Mapping[str, object]) -> None: ...
    async def receive(self, *, within_s: float = ...) -> Frame: ...
    def kill(self) -> None: ...
    async def stop(self, *, timeout_s: float = ...) -> None: ...


class Processes(Protocol):
    """Starts scoring processes, on the machines that `scoring.engine` selects."""

    @property
    def opening(self) -> Mapping[str, object]:
        """Return the first message that each process gets: the settings, and the base model's path on the process's
        machine."""

    @property
    def absence(self) -> str:
        """Return why the pool waits for processes; "" if it does not wait."""

    async def spawn(self, number: int) -> ScoringProcess:
        """Start a process that waits for its opening frame. Raises ChildExited if it cannot be started."""


def answer_s(config: HubConfig, *, width: int) -> float:
    """Return the timeout in seconds for one answer of a process that runs `width` calls at the same time."""
    return config.task.scorer_timeout_s * (1 if width == 1 else 2) + GRACE_S


def processes_of(config: HubConfig, *, base_dir: Path, logs: Path, width: int, cluster: RayLink | None) -> Processes:
    """Return the object that starts processes on the machines that `scoring.engine` selects."""
    if config.scoring.engine == "local":
        return LocalProcesses(config, base_dir=base_dir, logs=logs)
    assert cluster is not None
    _, opening = parcel_of(config, base_dir)
    return RayProcesses(cluster, opening, logs=logs, answer_s=answer_s(config, width=width))


class LocalProcesses:
    """Starts processes on the hub's machine."""

    _GUARDED: Final = sys.platform == "linux"
    """True if each process runs under a warden, which kills all processes that the scorer started. The hub ends a
    warden by SIGTERM: after SIGKILL the warden could not kill these processes."""

    def __init__(self, config: HubConfig, *, base_dir: Path, logs: Path) -> None:
        self.opening: Mapping[str, object] = {"config": config.model_dump(mode="json"), "base_dir": str(base_dir)}
        self.absence = ""
        self._logs = logs

    async def spawn(self, number: int) -> SupervisedChild:
        command = _command(self._logs, number, parent=str(os.getpid()) if self._GUARDED else "")
        return await SupervisedChild.spawn(command, _LIMITS)


class RayProcesses:
    """Starts each process under its own Ray actor."""

    def __init__(self, link: RayLink, opening: Mapping[str, object], *, logs: Path, answer_s: float) -> None:
        self.opening = opening
        self._link = link
        self._logs = logs
        self._answer_s = answer_s

    @property
    def absence(self) -> str:
        return self._link.absence(_KIND)

    async def spawn(self, number: int) -> ScoringProcess:
        """Start a process, as `Processes.spawn` does, but wait for the cluster first."""
        return await self._link.spawn(
            _KIND,
            f"{_KIND}-{number}",
            _command(self._logs, number, parent=PID),
            answer_s=self._answer_s,
            counted="arguments",
            ending_s=GRACE_S,
        )


def _command(logs: Path, number: int, *, parent: str) -> Command:
    """Return the command that starts a process. `parent` is the id of the process that runs the command, if a warden is
    used; else ""."""
    return Command(
        module="echo_hub.scoring.warden" if parent else "echo_hub.scoring.worker",
        arguments=(parent,) if parent else (),
        name="scoring",
        log=logs / f"scorer-{number}.log",
        env=_ENVIRONMENT,
        ends_its_own=bool(parent),
    )


def parcel_of(config: HubConfig, base_dir: Path) -> tuple[Parcel, Mapping[str, object]]:
    """Return the files that a scoring process needs on another machine, and the opening frame with the paths of these
    files on that machine."""
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
    """Return the user's own module, keyed by its place in the parcel. Return {} for an installed package: it must be
    installed on the other machine too."""
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
    """Return for users, in words, on which machines scoring runs."""
    count = config.task.scorer_processes
    if config.scoring.engine == "local":
        return f"{count} {'process' if count == 1 else 'processes'} beside the hub"
    actors = f"{count} Ray {'actor' if count == 1 else 'actors'} at {config.ray.address}"
    return f"{actors}, {config.ray.set_aside(_KIND)} each"
