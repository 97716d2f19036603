"""Weights & Biases as a metric sink (extra `wandb`): what is written there, and that it cannot hold the hub up.

The library runs in a process of its own, `echo_hub.sinks.wandb_process`: it has threads, a helper process and handlers
at exit that may wait for a network, none of which the hub should end with. RUN/wandb holds its files, and how far it
has come, so a restarted hub goes on in the same run of W&B. What the library has not yet sent when it is killed may be
missing there; RUN/tensorboard and the pages have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from echo_hub.config.sections import HubConfig
from echo_hub.sinks.base import Entry, Position
from echo_shared.errors import ConfigError, EchoError
from echo_shared.settings import without_secrets
from echo_shared.supervised import Command, SupervisedChild

TOLD_SECTIONS: Final = ("run", "model", "task", "sampling", "training", "objective", "evaluation", "leases", "trust")
"""Sections of the settings that W&B is told: none that may hold a secret, an address or a path of this machine."""


class WandB:
    """The sink."""

    name = "Weights & Biases"

    def __init__(self, config: HubConfig, *, directory: Path, logs: Path, run_id: str) -> None:
        """`directory` is its own."""
        self._config = config
        self._directory = directory
        self._logs = logs
        self._run_id = run_id
        self._child: SupervisedChild | None = None

    async def open(self) -> Position:
        """Raises ConfigError where the library is missing, or W&B does not take the run."""
        command = Command(module="echo_hub.sinks.wandb_process", name="wandb", log=self._logs / "wandb.log")
        self._child = await SupervisedChild.spawn(command)
        await self._child.open(self._opening())
        ready = _checked(self._child.ready)
        return Position(step=ready["step"], evaluated_at=ready["evaluated_at"])

    async def write(self, entries: Sequence[Entry], position: Position) -> None:
        assert self._child is not None, "it is open"
        told = [{**asdict(entry), "texts": [asdict(text) for text in entry.texts]} for entry in entries]
        await self._child.send({"entries": told, "position": asdict(position)})
        _checked(await self._child.receive())

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.stop(timeout_s=8.0)

    def _opening(self) -> dict[str, Any]:
        settings, metrics = without_secrets(self._config).model_dump(mode="json"), self._config.metrics
        return {
            "directory": str(self._directory),
            "mode": metrics.wandb,
            "project": metrics.wandb_project,
            "entity": metrics.wandb_entity,
            "run_id": self._run_id,
            "name": self._config.run.name,
            "settings": {section: settings[section] for section in TOLD_SECTIONS},
        }


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    match answer:
        case {"missing": what}:
            from echo_shared.installation import how_to_install

            raise ConfigError("The library of Weights & Biases is not installed.", got=what, do=how_to_install("wandb"))
        case {"failed": what}:
            raise EchoError("Weights & Biases has failed.", got=what)
    return answer
