"""Write to Weights & Biases through its own client (extra `wandb`), which sends figures from a background service.

RUN/wandb holds the client's files, and the position up to which entries are written. From there, a restarted hub
resumes the same W&B run. A killed service may lose figures that it has not stored yet. RUN/tensorboard and the hub's
pages still have these figures.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from echo_hub.config.sections import HubConfig
from echo_hub.sinks.reading import SAMPLES, Entry, Position
from echo_hub.sinks.texts import SampleText
from echo_shared.errors import ConfigError, EchoError
from echo_shared.files.atomic import write_private
from echo_shared.installation import how_to_install
from echo_shared.settings import without_secrets

TOLD_SECTIONS: Final = ("run", "model", "task", "sampling", "training", "objective", "evaluation", "leases", "trust")
"""Sections of the settings that are sent to W&B. These sections hold no secrets, addresses or local paths."""
VERSION: Final = "policy_version"
"""Name of the horizontal axis in W&B. W&B's own step numbers cannot be used, because they count calls."""
FINISH_S: Final = 6
"""Seconds that the client's service gets at the hub's end to send the remaining figures."""


class WandB:
    """Writes the run's metrics to W&B. `directory` holds only W&B's files. Raises ConfigError if the client is not
    installed.
    """

    name = "Weights & Biases"

    def __init__(self, config: HubConfig, *, directory: Path, run_id: str) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "Weights & Biases is not installed.",
                got=f'metrics.wandb = "{config.metrics.wandb}"',
                do=f'{how_to_install("wandb")}, or set metrics.wandb = "off".',
            )
        self._config = config
        self._directory = directory
        self._place = directory / "position.json"
        self._run_id = run_id
        self._client: Any = None
        """The module `wandb` while its service may hold resources. Otherwise None."""
        self._run: Any = None

    def open(self) -> Position:
        """Start the W&B run, or resume the run of the hub's earlier starts."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # Import here, because the import takes seconds.

        self._client = wandb
        metrics, settings = self._config.metrics, without_secrets(self._config).model_dump(mode="json")
        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "echo"),
            id=self._run_id,
            name=self._config.run.name,
            mode=metrics.wandb,  # type: ignore[arg-type]  # Opened only if it is not "off".
            resume="allow" if metrics.wandb == "online" else None,
            dir=str(self._directory),
            config={section: settings[section] for section in TOLD_SECTIONS},
            settings=wandb.Settings(  # Sends the figures, but nothing about this machine.
                console="off",
                disable_code=True,
                disable_git=True,
                finish_timeout=FINISH_S,
                init_timeout=90,
                login_timeout=30,
                save_code=False,
                silent=True,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )
        self._run.define_metric(VERSION, hidden=True)
        self._run.define_metric("*", step_metric=VERSION)
        return self._position()

    def write(self, entries: Sequence[Entry], position: Position) -> None:
        """Pass the entries to the client, then store the position."""
        for entry in entries:
            self._run.log(_row(self._client, entry))
        write_private(self._place, json.dumps({"run_id": self._run_id, **asdict(position)}).encode())

    def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        try:
            client.teardown()
        except SystemExit as error:
            raise EchoError("The service of Weights & Biases failed.", got=f"exit status {error.code}") from error

    def _position(self) -> Position:
        try:
            known = json.loads(self._place.read_bytes())
            if known["run_id"] == self._run_id:
                return Position(step=int(known["step"]), evaluated_at=float(known["evaluated_at"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return Position()


def _row(wandb: Any, entry: Entry) -> dict[str, Any]:
    """Return the entry as one row of W&B's history. "at" is the time on the hub's clock."""
    row: dict[str, Any] = {VERSION: entry.policy_version, "at": entry.at, **entry.scalars}
    for tag, values in entry.histograms.items():
        row[tag] = wandb.Histogram(np.asarray(values, np.float64))
    if entry.texts:
        columns = [field.name for field in fields(SampleText)]
        row[SAMPLES] = wandb.Table(columns=columns, data=[list(astuple(text)) for text in entry.texts])
    return row
