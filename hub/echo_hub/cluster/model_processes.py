"""Processes that compute with the base model and with adapters, on the hub's machine or in its Ray cluster.

The opening frame has `settings`, with the base model's directory. Each request has `adapters`, which maps a version to
the directory of its adapter. An adapter is sent to a process in the cluster with the first request that needs it, and
the process keeps the newest few.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from echo_hub.cluster.actor import SENT
from echo_hub.cluster.link import RayChild, RayLink
from echo_hub.cluster.parcel import base_model
from echo_hub.config.scoring_sections import WorkerKind
from echo_hub.learner.settings import LearnerSettings
from echo_shared.delta.adapter import WEIGHTS_FILE
from echo_shared.errors import LearnerError
from echo_shared.process.child import Frame
from echo_shared.process.supervised import Command, SupervisedChild

ANSWER_S: Final = 1_800.0
"""Timeout in seconds for each answer of a process, after the process is ready."""
_ENDING_S: Final = 5.0
_ENVIRONMENT: Final = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    kind: WorkerKind
    name: str
    """Name of the process in texts such as "The NAME process ended"."""
    module: Sequence[str]
    """Module to run, and its arguments."""
    counted: str
    """Key of a request whose value is a list: the process sends one answer for each item (see `RayLink.spawn`)."""
    env: Mapping[str, str] = field(default_factory=dict)


class ModelProcess(ABC):
    """Starts at most one process at a time. If the process dies, the caller must send all unanswered requests again."""

    def __init__(self, program: Program, settings: LearnerSettings, *, logs: Path) -> None:
        module, *arguments = program.module
        self._program = program
        self._settings = settings.model_dump(mode="json")
        self._command = Command(
            module=module,
            arguments=tuple(arguments),
            name=program.name,
            log=logs / f"{program.kind}.log",
            env={**_ENVIRONMENT, **program.env},
        )
        self._child: SupervisedChild | RayChild | None = None
        self.is_ready = False

    @property
    def pid(self) -> int | None:
        """Id of the local process. None if no local process runs."""
        return self._child.pid if isinstance(self._child, SupervisedChild) else None

    @property
    def absence(self) -> str:
        """Return why requests must wait for the process; "" if they need not wait."""
        return ""

    async def start(self, opening: Mapping[str, Any]) -> None:
        """Start a process. The previous process must be stopped by then. Raises ChildExited or ChildLost, or
        LearnerError if the process reports that it cannot work."""
        self._child = await self._spawn()
        await self._child.open({"settings": self._settings, **opening})
        if "failed" in self._child.ready:
            failed = self._child.ready["failed"]
            await self.stop()
            raise LearnerError(f"The {self._program.name} process cannot work.", got=failed)
        self.is_ready = True

    @abstractmethod
    async def _spawn(self) -> SupervisedChild | RayChild: ...

    @abstractmethod
    async def send(self, request: Mapping[str, Any], adapters: Mapping[int, Path]) -> None:
        """Send a request. `adapters` maps versions to local directories. Raises ChildExited and ChildLost."""

    async def receive(self) -> Frame:
        """Return the next answer. Raises ChildExited and ChildLost."""
        assert self._child is not None
        return await self._child.receive(within_s=ANSWER_S)

    async def stop(self) -> None:
        """End the process at once. Do nothing if no process runs."""
        child, self._child, self.is_ready = self._child, None, False
        if child is not None:
            child.kill()
            await child.stop()


class ProcessBeside(ModelProcess):
    """A process on the hub's machine. It reads adapters from the hub's directories."""

    async def _spawn(self) -> SupervisedChild:
        return await SupervisedChild.spawn(self._command)

    async def send(self, request: Mapping[str, Any], adapters: Mapping[int, Path]) -> None:
        assert isinstance(self._child, SupervisedChild)
        await self._child.send({**request, "adapters": {version: str(path) for version, path in adapters.items()}})


class ProcessInCluster(ModelProcess):
    """A process under its own Ray actor, on a cluster machine."""

    def __init__(self, program: Program, settings: LearnerSettings, *, logs: Path, cluster: RayLink, kept: int) -> None:
        """`kept` is the number of adapters that the process keeps on its machine."""
        super().__init__(program, settings, logs=logs)
        _, self._settings["base_dir"] = base_model(settings.base_dir)
        self._cluster = cluster
        self._kept = kept
        self._sent: set[int] = set()
        """Versions whose adapters the process has on its machine."""

    @property
    def absence(self) -> str:
        """Return why requests must wait for the process in the cluster; "" if they need not wait."""
        return self._cluster.absence(self._program.kind)

    async def _spawn(self) -> RayChild:
        self._sent = set()
        kind, counted = self._program.kind, self._program.counted
        return await self._cluster.spawn(
            kind, kind, self._command, answer_s=ANSWER_S, counted=counted, ending_s=_ENDING_S
        )

    async def send(self, request: Mapping[str, Any], adapters: Mapping[int, Path]) -> None:
        """Send a request, together with adapters that the process still lacks."""
        assert isinstance(self._child, RayChild)
        files = {
            f"{version}/{WEIGHTS_FILE}": adapters[version] / WEIGHTS_FILE for version in adapters.keys() - self._sent
        }
        self._sent |= adapters.keys()
        spare = sorted(self._sent - adapters.keys())[: max(0, len(self._sent) - self._kept)]
        self._sent -= set(spare)
        there = {version: f"../{SENT}/{version}" for version in adapters}
        await self._child.send({**request, "adapters": there}, files=files, dropped=[str(version) for version in spare])


def process_of(
    program: Program, settings: LearnerSettings, *, logs: Path, cluster: RayLink | None, kept: int
) -> ModelProcess:
    """Return a process in `cluster`, or a local process if `cluster` is None."""
    if cluster is None:
        return ProcessBeside(program, settings, logs=logs)
    return ProcessInCluster(program, settings, logs=logs, cluster=cluster, kept=kept)
