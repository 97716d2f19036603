"""Trial of an environment with state that runs in separate processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.evaluation.base_answers import trial_judge
from echo_hub.evaluation.by_hand import ListedReplies, play_by_hand
from echo_hub.evaluation.by_sessions import SessionJudge
from echo_hub.evaluation.session_trial import try_sessions
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.session_scorer import SessionScorer
from echo_hub.sessions.host import SessionHost
from echo_hub.tasks.stream import HeldOutProblems

BASE = resolve_base("builtin:small")
COUNTER = """
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Observation, Opening

class CounterSession:
    def __init__(self, text):
        self.text, self.count = text, 0

    async def reset(self):
        return Opening(text=self.text)

    async def step(self, reply):
        self.count += 1
        if reply.text == "stop":
            return Ending(reward=self.count / 4, components={"counted": 1.0})
        return Observation(text=f"{self.count}, ", turn_reward=0.125)

    async def score(self):
        return Ending(reward=0.0)

    async def close(self):
        pass

class Counter:
    name = "counter"
    max_turns = 4

    def sample(self, seed):
        return Problem(prompt="Count: ", metadata={"answer": "stop"})

    async def open(self, problem, seed):
        return CounterSession(problem.prompt)

def make(options):
    return Counter()
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubConfig:
    (tmp_path / "counter_to_try.py").write_text(COUNTER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    task = {"name": "python:counter_to_try:make", "scorer_processes": 1}
    return HubConfig.model_validate({"model": {"base": "builtin:small"}, "task": task, "sampling": {"max_tokens": 32}})


async def test_an_environment_with_state_is_tried_and_played(config: HubConfig, tmp_path: Path) -> None:
    codec = PromptCodec.of_run(config, BASE)
    problems = Problems.of_run(
        config, codec, held_out={"": HeldOutProblems(prompts=())}, base_dir=BASE, run_dir=tmp_path / "run"
    )
    async with (
        ScoringPool.open(config, problems, base_dir=BASE, logs=tmp_path) as pool,
        SessionHost.open(problems.session_tasks, config.sessions) as host,
    ):
        sessions = SessionScorer(host, problems, pool)
        judge = SessionJudge(sessions, problems, others=trial_judge(pool), losses=2, share=1)
        trial = await try_sessions(config, problems, judge=judge, count=2)
        assert not [one for one in trial.warnings if "same" in one], "equal prompts may begin different games"
        first = {answer.kind: answer for answer in trial.problems[0].answers}
        assert (first["reference"].reward, first["reference"].turns) == (0.25, 1)
        assert first["reference"].components == {"score": 0.25, "counted": 1.0}
        assert (first["empty"].reward, first["empty"].turns) == (0.0, 4), "the session is scored after four turns"
        played = await play_by_hand(config, problems, source=ListedReplies(["a", "b", "stop"]), judge=judge, index=9)
        assert [turn.reward for turn in played.turns] == [0.125, 0.125, 0.5] and played.reward == 0.75
        assert [turn.messages[0].text for turn in played.turns[:2]] == ["1, ", "2, "]
        await judge.close()
    problems.close()
