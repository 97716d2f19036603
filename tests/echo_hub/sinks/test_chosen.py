from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo_hub.config.file import load_config
from echo_hub.dashboard.source import Changes
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.sinks.chosen import chosen_sinks
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.store import Store


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        ({}, ["TensorBoard"]),
        ({"wandb": "offline"}, ["TensorBoard", "Weights & Biases"]),
        ({"tensorboard": False}, []),
    ],
)
def test_the_settings_choose(store: Store, tmp_path: Path, metrics: dict[str, Any], names: list[str]) -> None:
    config = load_config(None, {"metrics": metrics})
    codec = PromptCodec.load(resolve_base("builtin:tiny"))
    problems = Problems.of_run(config, codec)
    found = chosen_sinks(config, tmp_path, "run-1", AsyncStore(store), Changes(), codec=codec, problems=problems)
    assert [each._writer.name for each in found] == names
