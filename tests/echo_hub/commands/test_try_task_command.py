"""The try-task command with every kind of task that a hub supports."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from echo_hub.commands import progress_line
from echo_hub.config.file import load_config, render_config
from echo_hub.config.sections import HubConfig
from echo_hub.main import app
from echo_shared.errors import ConfigError
from tests.echo_hub.judge_endpoint import FakeEndpoint

OWN = """
from echo_hub.tasks.base import Problem

class Reverse:
    name = "reverse"

    def sample(self, seed):
        word = format(seed, "x")[:6]
        return Problem(prompt=f"[red]{word}", metadata={"answer": word[::-1]})

    def score(self, problem, completion):
        return float(completion.strip() == problem.metadata["answer"])

def make(options):
    return Reverse()

def fail(options):
    return 1 // 0

def nothing(options):
    return None
"""


def asked(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, ["try-task", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def said(*arguments: str | Path) -> str:
    return asked(*arguments).stdout


def found(*arguments: str | Path) -> dict[str, Any]:
    trial: dict[str, Any] = json.loads(said(*arguments, "--json"))
    return trial


@pytest.fixture(autouse=True)
def _one_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_HUB_TASK__SCORER_PROCESSES", "1")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_task_to_try.py").write_text(OWN)
    (tmp_path / "broken_task_to_try.py").write_text("def make(options)\n    return None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    return "python:own_task_to_try"


def test_try_task_shows_prompts_answers_and_rewards(own: str) -> None:
    text = said(f"{own}:make", "--count", "2")
    assert "Problem 2 of 2" in text and "  | [red]" in text, "no text is read as markup"
    rows = [line.split()[:2] for line in text.splitlines() if line.startswith("  ") and "|" not in line]
    assert rows.count(["reference", "1"]) == 2 and rows.count(["empty", "0"]) == 2
    assert "No problems found" in text


def test_a_seed_gives_other_problems_and_the_same_ones_again() -> None:
    first, again, other = (
        [problem["prompt"] for problem in found("arithmetic", "--seed", seed)["problems"]] for seed in ("1", "1", "2")
    )
    assert first == again != other and len(first) == 4


def test_lines_of_a_file_are_tried(tmp_path: Path) -> None:
    file = tmp_path / "two.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "Factor $x^2-1$.", "answer": "(x-1)(x+1)"}\n')
    trial = found("jsonl", "--option", f"path={file}", "--option", 'answer="math"')
    rewards = {(p["prompt"][0], a["kind"]): a["reward"] for p in trial["problems"] for a in p["answers"]}
    assert {rewards[problem, kind] for problem in "1F" for kind in ("reference", "tagged")} == {1}
    assert rewards["F", "copied"] == 0 and trial["warnings"] == [], "copying x^2-1 does not factor it"


def test_answers_that_the_scorer_cannot_read_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text('{"prompt": "Go on.", "answer": "1, 2, \\\\ldots, n"}\n')
    arguments = ("jsonl", "--option", f"path={file}", "--count", "1")
    trial = found(*arguments)
    (problem,) = trial["problems"]
    assert problem["reading"] == "not understood"
    verdicts = {answer["kind"]: (answer["reward"], answer["verdict"]) for answer in problem["answers"]}
    assert verdicts["tagged"] == (1, "right") and verdicts["copied"] == (0, "not understood")
    assert trial["warnings"][-1].endswith("so only the same text is right: line 1.")
    text = said(*arguments)
    assert "(not understood)" in text and "0, not understood" in text and "line 1." in text


def test_a_runs_settings_hold(tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    config = {"task": {"options": {"digits": 1, "operations": ["*"]}, "prompt_suffix": " "}}
    settings.write_text(render_config(load_config(None, config)))
    (problem,) = found("--config", settings, "--count", "1")["problems"]
    assert "*" in problem["prompt"] and problem["rendered"] == problem["prompt"] + " "
    (problem,) = found("--config", settings, "--option", "digits=2", "--count", "1")["problems"]
    assert "*" in problem["prompt"] and len(problem["prompt"]) == 6


def test_warnings_of_a_trial_are_printed() -> None:
    trial = found("reasoning-gym:sokoban", "--count", "1")
    assert trial["task"] == "reasoning-gym:sokoban"
    text = said("reasoning-gym:sokoban", "--count", "1")
    assert [f"Warning: {warning}" in text for warning in trial["warnings"]] == [True] * len(trial["warnings"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("arithmatic",), "did you mean arithmetic"),
        (("reasoning-gym:sokobann",), "Did you mean sokoban"),
        (("arithmetic", "--option", "digitz=3"), "task.options.digitz"),
        (("arithmetic", "--option", "digits"), "form NAME=VALUE"),
        (("jsonl",), "task.options.path"),
        (("jsonl", "--option", "path=/nowhere/a.jsonl"), "cannot be read"),
        (("python:no_such_module:make",), "cannot be imported"),
        (("python:own_task_to_try:fail",), "own_task_to_try.py, line"),
        (("python:own_task_to_try:nothing",), "is not a task"),
        (("python:broken_task_to_try:make",), "SyntaxError"),
        (("arithmetic", "--base", "builtin:huge"), "base model does not exist"),
        (("--config", "/nowhere/config.toml"), "cannot be read"),
    ],
)
def test_an_invalid_task_is_refused_with_advice(own: str, arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        said(*arguments)
    assert told in str(caught.value)


async def test_judges_are_asked_too(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    endpoint.rule = lambda said: "<score>4</score>"
    judge = {"kind": "llm", "url": endpoint.url, "model": "m"}
    config = HubConfig.model_validate({"reward": {"weights": {"style": 0.5}, "judges": {"style": judge}}})
    (tmp_path / "config.toml").write_text(render_config(config))
    trial = await asyncio.to_thread(found, "--config", tmp_path / "config.toml", "--count", "1")
    (reference,) = [answer for answer in trial["problems"][0]["answers"] if answer["kind"] == "reference"]
    assert reference["reward"] == pytest.approx(1.2)
    assert reference["components"] == {"score": 1.0, "style": pytest.approx(0.4)}
    endpoint.rule = lambda said: 400
    trial = await asyncio.to_thread(found, "--config", tmp_path / "config.toml", "--count", "1")
    assert any("The judge style does not answer." in warning for warning in trial["warnings"])


def test_the_base_itself_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_line, "PLAIN_S", 0.001)
    arguments = ("arithmetic", "--option", "digits=1", "--sample", "3")
    first, second = found(*arguments), asked(*arguments)
    text, progress = second.stdout, second.stderr.splitlines()
    assert "Sampling: loading the model." in progress
    assert progress[-1].startswith("Sampling: ") and "of 24 completions" in progress[-1]
    assert (len(first["problems"]), {len(problem["answers"]) for problem in first["problems"]}) == (3, {8})
    assert first["num_scored"] == 24 and 0 <= first["solved_rate"] <= 1 and first["base"] == "builtin:tiny"
    assert text.count("rewards of the group:") == 3 and text.count("  answered ") == 6
    assert f"{first['num_mixed']} of 3 groups of 8 have differing rewards" in text and first["verdict"] in text


def test_environments_are_answered_turn_by_turn() -> None:
    arguments = ("environment:guess", "--sample", "1")
    answers = [a for p in found(*arguments)["problems"] for a in p["answers"]]
    longest = max(answers, key=lambda answer: len(answer["turns"]))
    *earlier, last = longest["turns"]
    assert earlier and all(turn["messages"] for turn in earlier) and last["messages"] == []
    assert sum(turn["reward"] for turn in longest["turns"]) == pytest.approx(longest["reward"])
    text = said(*arguments)
    assert "  turn 1: " in text and "  observed  | " in text and "[answered: " not in text


def test_a_game_is_played_with_replies_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "replies.json"
    file.write_text('["U", "D", "L", "R", "never said"]')
    arguments = ("environment:sokoban", "--base", "builtin:small", "--replies", file)
    played, text = found(*arguments), said(*arguments)
    assert [turn["reply"] for turn in played["turns"]] == ["U", "D", "L", "R"] and played["has_ended"]
    assert [f"  turn {number}: " in text for number in range(1, 6)] == [True] * 4 + [False]
    assert f"ended after 4 turns: not solved, reward {played['reward']:g}" in text


def test_replies_may_come_from_standard_input() -> None:
    arguments = ["try-task", "environment:sokoban", "--base", "builtin:small", "--replies", "-"]
    result = CliRunner().invoke(app, arguments, input="U\nD\n", catch_exceptions=False)
    assert result.exit_code == 0 and "The episode has not ended: there were no more replies." in result.stdout
    assert result.stdout.count("  observed  | ") == 2, "the board after each of the two replies"
