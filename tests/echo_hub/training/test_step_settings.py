from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.config.task_sections import EvaluationConfig
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.coordinator import Coordinator
from echo_hub.run.directory import RunDirectory
from echo_hub.serving.core_settings import coordinator_settings
from echo_hub.training.step_settings import RunStepSettings


@pytest.mark.parametrize(
    ("publish_every", "every", "exported"), [(1, 0, [1, 2, 3, 4]), (3, 0, [3, 4]), (3, 2, [2, 3, 4])]
)
def test_a_version_is_exported_to_be_published_or_evaluated(
    tmp_path: Path, publish_every: int, every: int, exported: list[int]
) -> None:
    config = HubConfig(
        training=TrainingConfig(steps=4, publish_every=publish_every), evaluation=EvaluationConfig(every=every)
    )
    directory, settings = RunDirectory(tmp_path), coordinator_settings(config, multi_turn=False)
    steps = RunStepSettings(config, directory, Coordinator(settings, CoordinatorSnapshot()))
    paths = {step: steps.export_path(step) for step in range(1, 5)}
    assert [step for step, path in paths.items() if path is not None] == exported
    assert all(path == directory.adapter(step) for step, path in paths.items() if path is not None)
    asked_for = replace(settings, publish_changes=((1, 4),))
    steps = RunStepSettings(config, directory, Coordinator(asked_for, CoordinatorSnapshot()))
    assert steps.export_path(1) == directory.adapter(1), "an operator wanted it published"
