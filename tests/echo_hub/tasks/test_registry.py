from pathlib import Path

import pytest

from echo_hub.tasks.registry import make_task
from echo_shared.errors import ConfigError


@pytest.mark.parametrize(
    "name", ["arithmetic", "reasoning-gym:knights_knaves", "environment:guess", "environment:calculator"]
)
def test_a_task_has_the_requested_name(name: str) -> None:
    assert make_task(name, {}).name == name


@pytest.mark.parametrize(
    "name", ["", "arithmetics", "arithmetic:hard", "knights_knaves", "reasoning_gym:chain_sum", "environment:go"]
)
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="no such task") as caught:
        make_task(name, {})
    assert "reasoning-gym:DATASET" in str(caught.value)


@pytest.mark.parametrize("name", ["reasoning-gym", "reasoning-gym:"])
def test_a_dataset_must_be_named(name: str) -> None:
    with pytest.raises(ConfigError, match="no such reasoning-gym dataset"):
        make_task(name, {})


def test_a_task_of_ones_own_is_made_from_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_task_of_a_test.py").write_text(
        "class Own:\n    sample = score = None\n    def __init__(self, options):\n        self.name = options['name']\n"
        "def fail(options):\n    raise LookupError('no luck')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_task("python:echo_task_of_a_test:Own", {"name": "mine"}).name == "mine"
    with pytest.raises(ConfigError, match="has failed") as caught:
        make_task("python:echo_task_of_a_test:fail", {})
    assert "no luck" in str(caught.value) and "echo_task_of_a_test.py, line 6" in str(caught.value)
    with pytest.raises(ConfigError, match="is not a task"):
        make_task("python:builtins:dict", {})


@pytest.mark.parametrize(
    "name", ["python:no_such_module:make", "python:json:no_such_function", "python:", "python:json"]
)
def test_a_missing_function_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        make_task(name, {})
    assert name in str(caught.value)


def test_a_file_of_problems_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"task\.options\.path"):
        make_task("jsonl", {})
