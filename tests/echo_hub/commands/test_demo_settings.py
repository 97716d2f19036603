"""Every demo's settings must fit its task and base model."""

from __future__ import annotations

import pytest

from echo_hub.commands.demo_settings import DemoTask, demo_settings
from echo_hub.config.file import load_config
from echo_hub.run.base_model import PromptCodec, resolve_base
from echo_hub.scoring.problems import Problems


@pytest.mark.parametrize("task", DemoTask)
def test_problems_and_their_completions_have_room_in_the_base_model(task: DemoTask) -> None:
    config = load_config(None, demo_settings(task, {}))
    codec = PromptCodec.of_run(config, resolve_base(config.model.base))
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
