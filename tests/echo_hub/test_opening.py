"""What a run keeps from its first day."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo_hub.config.sections import EvaluationConfig, HubConfig
from echo_hub.opening import _check_unchanged
from echo_hub.run.directory import RunDirectory
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError


async def test_held_out_problems_are_fixed_for_the_training_prompts_avoid_them(tmp_path: Path) -> None:
    store = AsyncStore(Store.open(RunDirectory(tmp_path).database_url))
    await _check_unchanged(store, HubConfig(), "")
    await _check_unchanged(store, HubConfig(), "")
    with pytest.raises(ConfigError, match=r"evaluation\.problems = 64, was 256"):
        await _check_unchanged(store, HubConfig(evaluation=EvaluationConfig(problems=64)), "")
    await store.close()


async def test_a_setting_that_was_not_noted_down_at_first_is_fixed_from_then_on(tmp_path: Path) -> None:
    store = AsyncStore(Store.open(RunDirectory(tmp_path).database_url))
    await store.set_run_meta("fixed_settings", json.dumps({"run.seed": 0}))
    await _check_unchanged(store, HubConfig(evaluation=EvaluationConfig(problems=64)), "")
    with pytest.raises(ConfigError, match=r"evaluation\.problems = 256, was 64"):
        await _check_unchanged(store, HubConfig(), "")
    await store.close()
