"""Settings that `echo-hub init` chooses for a base model. The chat model is the tiny base with a chat template, because
only a model's files matter here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from echo_hub.commands.suited_settings import Suited, suited_settings
from echo_hub.config.file import load_config, render_chosen
from echo_hub.run.base_files import resolve_base
from echo_shared.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[reply]{% endif %}"
)


def chat_model(directory: Path, *, template: str = TEMPLATE, **changed: Any) -> Path:
    shutil.copytree(resolve_base("builtin:tiny"), directory)
    (directory / "chat_template.jinja").write_text(template)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changed}))
    return directory


def suited(base: Path | str, task: str, *, has_gpu: bool = False, **options: Any) -> tuple[dict[str, Any], Suited]:
    """Return the chosen values by dotted name, and the full choice with reasons."""
    flags = {"model": {"base": str(base)}, "task": {"name": task, "options": options}}
    config, chosen = suited_settings(flags, has_gpu=has_gpu)
    values = {f"{name}.{key}": value for name, keys in chosen.items() for key, (value, _) in keys.items()}
    for name, value in values.items():
        section, key = name.split(".")
        assert getattr(getattr(config, section), key) == value
    return values, chosen


def test_lengths_follow_the_tasks_own_problems(tmp_path: Path) -> None:
    base = chat_model(tmp_path / "chat", max_position_embeddings=4096)
    short, _ = suited(base, "arithmetic", digits=1)
    long, chosen = suited(base, "arithmetic", digits=18)
    assert short["sampling.max_tokens"] == 128 and long["sampling.max_tokens"] >= 192
    assert "reference answers up to" in chosen["sampling"]["max_tokens"][1]


def test_a_hub_without_a_task_opens_both_interfaces() -> None:
    values, chosen = suited("builtin:tiny", "none")
    assert values == {"tinker.enabled": True, "openai.enabled": True}
    assert all("tenants" in reason for keys in chosen.values() for _, reason in keys.values())


def test_a_model_that_thinks_has_room_to_think(tmp_path: Path) -> None:
    base = chat_model(tmp_path / "chat", template=TEMPLATE + "{# <think> #}", max_position_embeddings=8192)
    values, _ = suited(base, "arithmetic", digits=1)
    assert values["sampling.max_tokens"] > 1_024 and values["task.strip_thinking"] is True


def test_completions_fit_the_bases_context(tmp_path: Path) -> None:
    base = chat_model(tmp_path / "chat", max_position_embeddings=100)
    values, _ = suited(base, "arithmetic", digits=1)
    assert 16 <= values["sampling.max_tokens"] < 100
    with pytest.raises(ConfigError, match="no space for a reply in the base model's context"):
        suited(chat_model(tmp_path / "less", max_position_embeddings=30), "arithmetic", digits=18)


@pytest.mark.parametrize(
    ("task", "options", "has_tags"),
    [
        ("reasoning-gym:chain_sum", {}, True),
        ("jsonl", {"answer": "exact"}, True),
        ("jsonl", {"answer": "math"}, False),
        ("arithmetic", {}, False),
    ],
)
def test_prompts_ask_for_tags_if_the_scorer_reads_them(
    tmp_path: Path, task: str, options: dict[str, Any], has_tags: bool
) -> None:
    base = chat_model(tmp_path / "chat", max_position_embeddings=8192)
    if task == "jsonl":
        options["path"] = str(tmp_path / "some.jsonl")
        lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(50)]
        Path(options["path"]).write_text("\n".join(lines))
    values, _ = suited(base, task, **options)
    assert ("<answer>" in values.get("task.prompt_suffix", "")) is has_tags
    assert values["evaluation.problems"] == (10 if task == "jsonl" else 64), "a fifth of the file"


def test_sizes_follow_the_weights_and_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = chat_model(tmp_path / "chat", max_position_embeddings=4096, num_hidden_layers=30, hidden_size=576)
    small, _ = suited(base, "arithmetic")
    assert (small["training.group_size"], small["training.groups_per_step"]) == (16, 4)
    assert small["training.learning_rate"] == 1e-4 and small["learner.micro_batch_tokens"] % 256 == 0
    monkeypatch.setattr("echo_hub.commands.suited_settings._num_weights", lambda path: 7_000_000_000)
    large, _ = suited(base, "arithmetic")
    assert (large["training.group_size"], large["training.learning_rate"]) == (8, 2e-5)
    assert large["learner.precision"] == "bfloat16", "a quarter of no test machine's memory is large enough for float32"
    on_gpu, _ = suited(base, "arithmetic", has_gpu=True)
    assert on_gpu["training.groups_per_step"] == 16
    assert not [name for name in on_gpu if name.startswith(("learner.", "evaluation."))]


def test_flags_win_and_the_file_gives_the_same_settings_back(tmp_path: Path) -> None:
    base = chat_model(tmp_path / "chat", max_position_embeddings=4096)
    flags = {"model": {"base": str(base)}, "task": {"name": "arithmetic"}, "training": {"steps": 3, "group_size": 4}}
    config, chosen = suited_settings(flags, has_gpu=False)
    assert (config.training.steps, config.training.group_size) == (3, 4)
    reasons = {section: {key: reason for key, (_, reason) in keys.items()} for section, keys in chosen.items()}
    (tmp_path / "config.toml").write_text(text := render_chosen(config, reasons))
    assert load_config(tmp_path / "config.toml", {}) == config
    assert "LoRA needs about ten times" in text and text.count(" = ") < 15


def test_a_built_in_base_keeps_the_defaults(tmp_path: Path) -> None:
    values, _ = suited("builtin:tiny", "arithmetic", digits=2)
    assert values == {}


@pytest.mark.parametrize("base", ["builtin:huge", "/nowhere/at/all"])
def test_a_missing_base_is_named(base: str) -> None:
    with pytest.raises(ConfigError, match="base model does not exist"):
        suited(base, "arithmetic")
