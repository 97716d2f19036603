"""The trial of a task on sample problems and answers, with real scoring processes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from echo_hub.config.file import load_config
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.trial import FREE, MOST_TURNS, Trial, TriedAnswer, try_task
from echo_hub.tasks.free_rewards import PAID_FOR_NOTHING
from echo_hub.tasks.stream import HeldOutProblems
from echo_shared.errors import ScorerError

ODD = '''
"""Tasks with everything that can be wrong with one."""
import os
import time

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Observation


class Odd:
    name = "odd"

    def __init__(self, options):
        self.options = options

    def sample(self, seed):
        if self.options.get("sample") == "raises":
            raise LookupError("no problem today")
        if self.options.get("sample") == "process":
            seed = os.getpid()
        if self.options.get("sample") == "one":
            seed = 1
        return Problem(prompt=f"{seed % 1000}+1=", metadata={"answer": str(seed % 1000 + 1)})

    def score(self, problem, completion):
        match self.options.get("score"):
            case "pays":
                return 0.25
            case "half":
                return 0.5 * (completion == problem.metadata["answer"])
            case "raises":
                raise LookupError("13 brings bad luck")
            case "sleeps" if not completion:
                time.sleep(1000)
        return float(completion == problem.metadata["answer"])


class Told(Odd):
    def components(self, problem, completion):
        return {"right": self.score(problem, completion), "short": 1.0}


class Endless(Odd):
    def respond(self, problem, replies):
        return Ending(reward=1.0) if replies[-1] == problem.metadata["answer"] else Observation(text="no=")
'''


async def tried(tmp_path: Path, name: str, options: dict[str, Any], *, count: int = 3, **task: Any) -> Trial:
    config = load_config(None, {"task": {"name": name, "options": options, "scorer_processes": 1, **task}})
    base_dir = resolve_base(config.model.base)
    codec = PromptCodec.of_run(config, base_dir)
    problems = Problems.of_run(config, codec, held_out={"": HeldOutProblems(prompts=())})
    async with ScoringPool.open(config, problems, base_dir=base_dir, logs=tmp_path / "logs", is_patient=False) as pool:
        return await try_task(config, problems, codec, pool=pool, count=count)


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "odd_task_on_trial.py").write_text(ODD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    return "python:odd_task_on_trial"


def answers(found: Trial, kind: str) -> list[TriedAnswer]:
    return [answer for problem in found.problems for answer in problem.answers if answer.kind == kind]


async def test_sums_pay_for_the_right_number_alone(tmp_path: Path) -> None:
    found = await tried(tmp_path, "arithmetic", {"digits": 2})
    assert len(found.problems) == 3 and found.warnings == ()
    for kind, reward in {"empty": 0, "copied": 0, "random": 0, "another": 0, "reference": 1, "tagged": 0}.items():
        assert [answer.reward for answer in answers(found, kind)] == [reward] * 3
    for problem in found.problems:
        left, _, right = problem.prompt.removesuffix("=").partition("+")
        assert problem.reference == str(int(left) + int(right))
        assert problem.rendered == problem.prompt and problem.prompt_tokens == len(problem.prompt)
        (random_one,) = [a.text for a in problem.answers if a.kind == "random"]
        assert random_one != problem.reference and len(random_one) == len(problem.reference)
    assert found == await tried(tmp_path, "arithmetic", {"digits": 2}), "the same seed gives the same trial"


async def test_the_prompt_is_shown_with_the_runs_own_words(tmp_path: Path) -> None:
    found = await tried(tmp_path, "arithmetic", {}, count=1, system_prompt="Be brief.", prompt_suffix=" Now!")
    (problem,) = found.problems
    assert problem.rendered == f"Be brief.\n\n{problem.prompt} Now!"
    assert [answer.kind for answer in problem.answers] == ["empty", "copied", "random", "reference", "tagged"]


async def test_an_environment_is_played_to_its_end(tmp_path: Path) -> None:
    found = await tried(tmp_path, "environment:guess", {"turns": 3})
    assert {(answer.reward, answer.turns, answer.error) for answer in answers(found, "empty")} == {(0.0, 3, "")}
    assert answers(found, "reference") == [] and found.problems[0].reference is None


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        ({}, []),
        ({"score": "pays"}, [r"empty.*3 of 3.*0\.25", r"copied.*paid", r"random.*paid", r"reference.*highest.*0\.25"]),
        ({"score": "half"}, [r"reference answer does not earn the highest reward, 1, on 3 of 3.*: 0\.5"]),
        ({"score": "raises"}, [r"18 answers have no reward.*13 brings bad luck"]),
        ({"sample": "process"}, [r"another problem in another process", r"problems are the same"]),
        ({"sample": "one"}, [r"problems are the same"]),
    ],
)
async def test_suspicious_trials_give_warnings(
    tmp_path: Path, odd: str, options: dict[str, str], warnings: list[str]
) -> None:
    found = await tried(tmp_path, f"{odd}:Odd", options)
    for pattern in warnings:
        assert any(re.search(pattern, warning) for warning in found.warnings), (pattern, found.warnings)
    assert bool(found.warnings) == bool(warnings)


async def test_a_scorer_has_the_limits_of_a_run(tmp_path: Path, odd: str) -> None:
    found = await tried(tmp_path, f"{odd}:Odd", {"score": "sleeps"}, count=1, scorer_timeout_s=0.5)
    (empty,), (reference,) = answers(found, "empty"), answers(found, "reference")
    assert empty.reward is None and "took too long" in empty.error and "scorer_timeout_s" in empty.error
    assert reference.reward == 1
    assert any("took too long" in warning for warning in found.warnings)


async def test_the_parts_of_a_reward_are_reported(tmp_path: Path, odd: str) -> None:
    found = await tried(tmp_path, f"{odd}:Told", {}, count=1)
    assert [answer.components for answer in answers(found, "reference")] == [{"score": 1.0, "right": 1.0, "short": 1.0}]


async def test_an_episode_that_never_ends_is_an_error(tmp_path: Path, odd: str) -> None:
    found = await tried(tmp_path, f"{odd}:Endless", {}, count=1)
    (empty,), (reference,) = answers(found, "empty"), answers(found, "reference")
    assert (empty.reward, empty.turns) == (None, MOST_TURNS) and "has not ended" in empty.error
    assert (reference.reward, reference.turns) == (1.0, 1)


async def test_a_sampler_that_fails_is_named(tmp_path: Path, odd: str) -> None:
    with pytest.raises(ScorerError, match="cannot sample") as caught:
        await tried(tmp_path, f"{odd}:Odd", {"sample": "raises"})
    assert "no problem today" in str(caught.value)


async def test_problems_that_the_base_cannot_take_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text('{"prompt": "' + "Wie groß? " * 30 + '", "answer": "1"}\n{"prompt": "1+1=", "answer": "2"}\n')
    found = await tried(tmp_path, "jsonl", {"path": str(file)}, count=12)
    assert any("leave no room in the context of builtin:tiny" in warning for warning in found.warnings)
    assert any("has no tokens for some characters" in warning for warning in found.warnings)
    assert {answer.reward for answer in answers(found, "reference")} == {1.0}


GYM = '''
"""A dozen datasets of reasoning-gym in one task, so that one pool scores them all."""
from echo_hub.tasks.base import Problem
from echo_hub.tasks.reasoning_gym import make_reasoning_gym


class Gym:
    name = "gym"

    def __init__(self, datasets):
        self.tasks = [make_reasoning_gym(dataset, {}) for dataset in datasets]

    def sample(self, seed):
        at = seed % len(self.tasks)
        problem = self.tasks[at].sample(seed // len(self.tasks))
        return Problem(prompt=problem.prompt, metadata={"answer": problem.metadata["answer"], "at": at, "own": problem})

    def score(self, problem, completion):
        return self.tasks[problem.metadata["at"]].score(problem.metadata["own"], completion)


def make(options):
    return Gym(options["datasets"])
'''
DOZEN = (
    *("chain_sum", "knights_knaves", "spiral_matrix", "n_queens", "letter_counting", "leg_counting"),
    *("basic_arithmetic", "gcd", "lcm", "prime_factorization", "word_sorting", "count_bits"),
)


async def test_a_dozen_of_reasoning_gym_pay_for_the_reference_answer_and_little_for_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gym_task_on_trial.py").write_text(GYM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    found = await tried(tmp_path, "python:gym_task_on_trial:make", {"datasets": list(DOZEN)}, count=36)
    seen = {DOZEN[problem.seed % len(DOZEN)] for problem in found.problems}
    assert len(seen) >= 10
    for problem in found.problems:
        dataset, earned = DOZEN[problem.seed % len(DOZEN)], {a.kind: a.reward for a in problem.answers}
        assert (earned["reference"], earned["tagged"]) == (1.0, 1.0), dataset
        assert problem.rendered == problem.prompt
        paid = max(reward or 0.0 for kind, reward in earned.items() if kind in FREE)
        assert paid <= 5 * PAID_FOR_NOTHING.get(dataset, 0.0) + 0.05, (dataset, earned)
