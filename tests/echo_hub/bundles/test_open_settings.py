from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo_hub.bundles.open_settings import checkers_config, open_settings, why_not_scored
from echo_hub.config.file import load_config
from echo_shared.errors import CodecError
from echo_shared.settings import MASK
from tests.test_declared_secrets import SAID, SECRETS

JUDGE = {"kind": "llm", "url": "http://judge.internal:8000/v1", "model": "m", "prompt": "{prompt}{completion}"}
PRIVATE: dict[str, Any] = {
    **SECRETS,
    "model": {"base": "{base}", "start_from": "/home/ada/first-adapter"},
    "reward": {"judges": {"taste": JUDGE}, "weights": {"taste": 0.5}},
    "learner": {"address": "10.0.0.7:29500", "hosts": 2, "processes": 2},
    "task": {
        "mixture": {
            "own": {
                "name": "jsonl",
                "options": {
                    "path": "/home/ada/secret-place/train.jsonl",
                    "file": "data/inner/words.txt",
                    "service": "https://ada:task-password@example.org/x",
                    "api_key": "a-key-of-ours",
                    "level": "easy",
                    "deep": [{"where": "C:\\Users\\ada\\x.txt"}],
                },
            }
        }
    },
}


def test_settings_for_strangers_hold_nothing_private(tmp_path: Path) -> None:
    base = tmp_path / "home-of-ada" / "Small-Model"
    base.mkdir(parents=True)
    config = load_config(None, {**PRIVATE, "model": {**PRIVATE["model"], "base": str(base)}})
    shown = json.dumps(open_settings(config))
    hidden = (
        *SAID,
        "task-password",
        "a-key-of-ours",
        "home-of-ada",
        "/home",
        "Users",
        "inner",
        "10.0.0.7",
        "judge.internal",
    )
    assert [text for text in hidden if text in shown] == [] and "judge.internal" not in shown
    found = open_settings(config)
    assert found["model"] == {"base": "Small-Model", "start_from": "start"}
    assert found["reward"]["weights"] == {}, "nobody can recompute what a judge said"
    options = found["task"]["mixture"]["own"]["options"]
    assert options == {
        "path": "train.jsonl",
        "file": "words.txt",
        "service": MASK,
        "api_key": MASK,
        "level": "easy",
        "deep": [{"where": "x.txt"}],
    }


def test_a_checker_gets_the_settings_that_matter() -> None:
    given = load_config(
        None,
        {
            "run": {"seed": 5},
            "sampling": {"temperature": 0.7, "stop": ["x"]},
            "training": {"learning_rate": 1e-3},
            "objective": {"name": "dapo"},
            "task": {"name": "jsonl", "options": {"path": "/private/problems.jsonl"}},
        },
    )
    shown = json.loads(json.dumps(open_settings(given)))
    found = checkers_config(shown, base="builtin:tiny", options={"path": "mine.jsonl"}, trust={"verifier_threads": 3})
    for section in ("run", "sampling", "training", "objective", "evaluation"):
        assert getattr(found, section) == getattr(given, section)
    assert found.task.options == {"path": "mine.jsonl"}
    assert found.trust.verifier_threads == 3
    assert found.model.base == "builtin:tiny"


def test_options_of_a_mixture_are_named_by_its_tasks() -> None:
    shown = json.loads(json.dumps(open_settings(load_config(None, {"task": PRIVATE["task"]}))))
    found = checkers_config(shown, base="builtin:tiny", options={"own.path": "mine.jsonl"}, trust={})
    assert found.task.members["own"].options["path"] == "mine.jsonl"
    assert why_not_scored(found, options={"own.path": "mine.jsonl"}, runs_own_code=False) == ""
    assert "--option own.path=FILE" in why_not_scored(found, options={}, runs_own_code=False)


def test_somebodys_own_code_runs_only_if_the_checker_says_so() -> None:
    config = load_config(None, {"task": {"name": "python:os:getcwd"}})
    assert "--run-task-code" in why_not_scored(config, options={}, runs_own_code=False)
    assert why_not_scored(config, options={}, runs_own_code=True) == ""


@pytest.mark.parametrize(
    "settings",
    [None, [], "x", {"run": 5}, {"run": {"seed": -1}}, {"training": {"nothing": 1}}, {"task": {"mixture": {"a": 1}}}],
)
def test_settings_that_are_none_are_refused(settings: Any) -> None:
    with pytest.raises(CodecError, match="not valid here"):
        checkers_config(settings, base="builtin:tiny", options={}, trust={})
