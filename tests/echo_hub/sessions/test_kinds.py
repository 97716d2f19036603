"""Environments with state, by their task's name: own environments run in processes with the hub's interpreter, others
in another interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.config.task_sections import EvaluationConfig, SamplingConfig, TaskConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.task_problems import EnvironmentReply
from echo_hub.sessions.host import SessionHost
from echo_hub.sessions.kinds import SessionPlace, make_any_task
from echo_hub.sessions.process import ProcessEnvironment
from echo_hub.sessions.turns import EpisodeEnd, NextTurn, SessionKey
from echo_hub.tasks.arithmetic import ArithmeticTask
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import EnvironmentAway
from echo_shared.errors import ConfigError
from tests.echo_hub.sessions.test_host import turn

MODULE = """
import random
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Observation, Opening

class Walk:
    name = "walk"
    reward_bounds = (-1.0, 1.0)
    reward_if_lost = -0.5

    def __init__(self, steps):
        self.steps = steps

    def sample(self, seed):
        return Problem(prompt="walk", metadata={"start": seed % 1000})

    async def open(self, problem, seed):
        return Steps(problem.metadata["start"], seed, self.steps)

class Steps:
    def __init__(self, at, seed, left):
        self.at, self.left = at, left
        self.rng = random.Random(seed)

    async def reset(self):
        return Opening(text="walk")

    async def step(self, reply):
        self.at += len(reply.text) + self.rng.randrange(10)
        self.left -= 1
        return Observation(text=str(self.at), turn_reward=0.5) if self.left else Ending(reward=1.0)

    async def score(self):
        return Ending(reward=0.25)

    async def close(self):
        pass

def make(options):
    return Walk(options["steps"])
"""


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubConfig]:
    (tmp_path / "echo_walk_of_a_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield HubConfig(
        task=TaskConfig(name="python:echo_walk_of_a_test:make", options={"steps": 3}),
        evaluation=EvaluationConfig(problems=3),
        sampling=SamplingConfig(max_tokens=8),
    )
    sys.modules.pop("echo_walk_of_a_test", None)


async def test_an_own_environment_with_state_plays_its_episodes_in_a_process(walk: HubConfig, tmp_path: Path) -> None:
    base_dir = resolve_base("builtin:small")
    codec = PromptCodec.of_run(walk, base_dir)
    problems = Problems.of_run(walk, codec, base_dir=base_dir, run_dir=tmp_path / "run")
    problems.prepare()
    assert problems.multi_turn and problems.has_state(0)
    key, problem, seed = problems.session_of(0)
    assert problem.prompt == "walk" and problems.session_of(1)[1] != problem
    assert len(problems.heldout_prompt_ids()) == 3
    async with SessionHost.open(problems.session_tasks, walk.sessions) as host:
        turns = [turn("a")]
        answer = await host.respond(SessionKey(0, 0), key, problem=problem, seed=seed, turns=turns)
        assert isinstance(answer, NextTurn)
        task = problems.tasks[key]
        settled = task.settled(answer, [turns[0].completion_ids])
        assert isinstance(settled, EnvironmentReply) and settled.turn_reward == 0.5
        other = await host.respond(SessionKey(0, 1), key, problem=problem, seed=seed, turns=turns)
        assert isinstance(other, NextTurn), "members of a group meet the same world"
        assert other.observation_ids.tolist() == answer.observation_ids.tolist()
    assert task.settled(EpisodeEnd(ending=None, refusal="no"), [turns[0].completion_ids]) == -0.5
    assert task.lost([turns[0].completion_ids]) == -0.5
    again = Problems.of_run(walk, codec, base_dir=base_dir, run_dir=tmp_path / "run")
    assert again.session_of(0) == (key, problem, seed)
    stateful = again.tasks[key].stateful
    assert isinstance(stateful, ProcessEnvironment) and stateful.process.pid is None, "the problem was written down"
    problems.close()
    again.close()


def test_tasks_with_the_same_environment_share_no_directory(tmp_path: Path) -> None:
    game = {"name": "textarena:GuessTheNumber-v0"}
    mixture = {"short": {**game, "system_prompt": "Answer shortly."}, "long": game}
    config = HubConfig(task=TaskConfig.model_validate({"mixture": mixture}))
    base_dir = resolve_base("builtin:small")
    problems = Problems.of_run(config, PromptCodec.of_run(config, base_dir), base_dir=base_dir, run_dir=tmp_path)
    games = [task.stateful for task in problems.tasks.values()]
    directories = {one.process.plan.directory for one in games if isinstance(one, ProcessEnvironment)}
    assert len(directories) == 2, "the end of a process empties its directory"


def test_other_tasks_are_made_as_before() -> None:
    assert isinstance(make_any_task("arithmetic", {}, SessionPlace()), ArithmeticTask)


def test_a_games_options_are_checked_before_its_process_starts() -> None:
    with pytest.raises(ConfigError, match="not valid"):
        make_any_task("textarena:GuessTheNumber-v0", {"observation": "old"}, SessionPlace())
    game = make_any_task("textarena:GuessTheNumber-v0", {"max_turns": 5}, SessionPlace())
    assert isinstance(game, ProcessEnvironment) and game.process.pid is None
    assert (game.reward_bounds, game.max_turns) == ((-1.0, 1.0), 5)  # type: ignore[attr-defined]


def test_an_interpreter_without_the_package_is_an_error_of_settings(tmp_path: Path) -> None:
    place = SessionPlace(config=SessionsConfig(python=sys.executable), run_dir=tmp_path)
    game = make_any_task("textarena:GuessTheNumber-v0", {}, place)
    assert isinstance(game, ProcessEnvironment)
    with pytest.raises(ConfigError, match="cannot be made") as caught:
        game.sample(1)
    assert "No module named 'textarena'" in str(caught.value)
    game._openings.put(1, Problem(prompt="guess"))
    assert game.sample(1).prompt == "guess"
    with pytest.raises(EnvironmentAway, match="cannot be made"):  # Settings that have worked are not wrong.
        game.sample(2)
    game.stop()
