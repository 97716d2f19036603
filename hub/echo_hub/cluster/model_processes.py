"""Processes that compute by the base model and adapters: beside the hub, or in its Ray cluster, the same program.

The opening frame has `settings`, with the base model's directory; each request has `adapters`: of each version that it
is about, the directory with its adapter. To a process in the cluster an adapter is sent with the first request that
needs it; of those before, it keeps the newest few.
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
from echo_shared.adapter import WEIGHTS_FILE
from echo_shared.child import Frame
from echo_shared.errors import LearnerError
from echo_shared.supervised import Command, SupervisedChild

ANSWER_S: Final = 1_800.0
"""For one answer more."""
_ENDING_S: Final = 5.0
_ENVIRONMENT: Final = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One of them."""

    kind: WorkerKind
    name: str
    """As in "The NAME process ended"."""
    module: Sequence[str]
    """What is run, and its arguments."""
    counted: str
    """See `RayLink.spawn`."""
    env: Mapping[str, str] = field(default_factory=dict)


class ModelProcess(ABC):
    """One process at a time, which holds nothing that is not asked for again when it has died."""

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
        """Of the process beside the hub; None while there is none."""
        return self._child.pid if isinstance(self._child, SupervisedChild) else None

    @property
    def absence(self) -> str:
        """Why none works, where it is waited for; empty = nothing is amiss."""
        return ""

    async def start(self, opening: Mapping[str, Any]) -> None:
        """In place of the one before, which has been stopped. Raises ChildExited, ChildLost, or LearnerError when it
        cannot work at all."""
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
        """`adapters`: directories of this machine, by version. Raises ChildExited and ChildLost."""

    async def receive(self) -> Frame:
        """The next answer. Raises ChildExited and ChildLost."""
        assert self._child is not None
        return await self._child.receive(within_s=ANSWER_S)

    async def stop(self) -> None:
        """Ends it at once. Harmless when there is none."""
        child, self._child, self.is_ready = self._child, None, False
        if child is not None:
            child.kill()
            await child.stop()


class ProcessBeside(ModelProcess):
    """It reads adapters where they are."""

    async def _spawn(self) -> SupervisedChild:
        return await SupervisedChild.spawn(self._command)

    async def send(self, request: Mapping[str, Any], adapters: Mapping[int, Path]) -> None:
        """See `ModelProcess`."""
        assert isinstance(self._child, SupervisedChild)
        await self._child.send({**request, "adapters": {version: str(path) for version, path in adapters.items()}})


class ProcessInCluster(ModelProcess):
    """Below an actor of its own."""

    def __init__(self, program: Program, settings: LearnerSettings, *, logs: Path, cluster: RayLink, kept: int) -> None:
        """`kept`: adapters that it has at hand."""
        super().__init__(program, settings, logs=logs)
        _, self._settings["base_dir"] = base_model(settings.base_dir)
        self._cluster = cluster
        self._kept = kept
        self._sent: set[int] = set()
        """Versions whose adapters this process has."""

    @property
    def absence(self) -> str:
        """See `ModelProcess`."""
        return self._cluster.absence(self._program.kind)

    async def _spawn(self) -> RayChild:
        """Waits for the cluster."""
        self._sent = set()
        kind, counted = self._program.kind, self._program.counted
        return await self._cluster.spawn(
            kind, kind, self._command, answer_s=ANSWER_S, counted=counted, ending_s=_ENDING_S
        )

    async def send(self, request: Mapping[str, Any], adapters: Mapping[int, Path]) -> None:
        """See `ModelProcess`."""
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
    """`cluster`: where it is to run; None: beside the hub."""
    if cluster is None:
        return ProcessBeside(program, settings, logs=logs)
    return ProcessInCluster(program, settings, logs=logs, cluster=cluster, kept=kept)
