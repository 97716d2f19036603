"""Settings of single steps: the directory for the adapter, the learning rate, and the objective.

The settings depend only on the step and on operators' changes before it, so a repeated step gets the same settings.
"""

from __future__ import annotations

from pathlib import Path

from echo_hub.config.sections import HubConfig
from echo_hub.core.coordinator import Coordinator
from echo_hub.evaluation.due import is_due
from echo_hub.learner.schedule import share_of_highest
from echo_hub.run.directory import RunDirectory


class RunStepSettings:
    def __init__(
        self, config: HubConfig, directory: RunDirectory, coordinator: Coordinator, *, steps_before: int = 0
    ) -> None:
        """`steps_before`: version of the adapter from which the run starts; 0 without one. The learning-rate schedule
        does not count the steps up to this version."""
        self._config = config
        self._directory = directory
        self._coordinator = coordinator
        self._steps_before = steps_before

    def export_path(self, step: int) -> Path | None:
        """Return the directory for the step's adapter. Return None if the step's version is neither published nor
        evaluated: no part of the hub reads the adapter then."""
        is_needed = self._coordinator.settings.is_due(step) or is_due(self._config, step)
        return self._directory.adapter(step) if is_needed else None

    def learning_rate(self, step: int) -> float:
        """Return the step's learning rate: the highest rate, which the operator may change, times the schedule's share
        for this step."""
        highest = self._coordinator.settings.learning_rate_of(step)
        return highest * share_of_highest(self._config.training, step, steps_before=self._steps_before)

    def objective(self, step: int) -> str | None:
        """Return the step's objective as JSON. None means the objective in the learner's settings."""
        return self._coordinator.settings.objective_of(step)
