"""Evaluations by the hub of a game with state, by the real session host. The environment runs in the test's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.evaluation.by_hub import Answer, Episode, Generated, HeldOut, Played, play
from echo_hub.evaluation.by_sessions import SessionJudge
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.session_scorer import SessionScorer
from echo_hub.sessions.host import SessionHost
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.errors import ScorerError
from echo_shared.records.run import EvaluationKind
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.wire.messages import FinishReason
from tests.echo_hub.scoring.counting_game import CountingGame, problems_of

CODEC = PromptCodec.load(resolve_base("builtin:tiny"))
PROBLEMS = 3


class Engine:
    """An engine whose completions are one number, made of index and turn. Before each round the engine calls `before`,
    which tests replace.
    """

    def __init__(self, game: CountingGame) -> None:
        self.game = game
        self.rounds: list[list[GroupRequest]] = []

    def before(self) -> None:
        pass

    async def __call__(self, requests: Sequence[GroupRequest], *, greedy: bool) -> Generated:
        self.rounds.append(list(requests))
        self.before()
        rollouts = [
            FinishedRollout(
                lease_id=request.lease_id,
                group_id=request.group_id,
                index=index,
                policy_version=request.policy_version,
                completion_ids=np.append(CODEC.encode_raw(str(index + 1)), CODEC.stop_ids[0]).astype(np.int32),
                behavior_logprobs=np.zeros(2, np.float32),
                finish_reason=FinishReason.STOP,
                sampling_s=0.0,
            )
            for request in requests
            for index in request.indices
        ]
        return Generated(rollouts=rollouts, seconds=1.0)


class Bench:
    def __init__(self, game: CountingGame, problems: Problems, host: SessionHost, pool: ScoringPool) -> None:
        self.game, self.engine = game, Engine(game)
        self.judge = SessionJudge(SessionScorer(host, problems, pool), problems, others=nobody, losses=2, share=1)

    async def play(self, samples: int = 2) -> list[Episode]:
        heldout = HeldOut(
            prompts=[CODEC.encode_prompt(f"{number}=") for number in range(PROBLEMS)],
            run_seed=3,
            samples=samples,
            temperature=1.0,
            max_tokens=4,
            stop_ids=CODEC.stop_ids,
            rewards=RewardBounds(),
            of_training=True,
        )
        async with asyncio.timeout(60):
            episodes, _ = await play(0, heldout, EvaluationKind.SAMPLED, generate=self.engine, judge=self.judge)
        return episodes


async def nobody(played: Sequence[Played]) -> Sequence[float | ScorerError]:
    raise AssertionError("all tasks have state")


@pytest.fixture
def game() -> CountingGame:
    return CountingGame()


@pytest.fixture(params=[1, 2, 64])
async def bench(request: pytest.FixtureRequest, game: CountingGame, tmp_path: Path) -> AsyncIterator[Bench]:
    """Yield a judge whose session host has as many slots as the test's parameter says."""
    problems = problems_of(game, CODEC)
    config = HubConfig.model_validate({"task": {"name": "none"}, "tinker": {"enabled": True}})
    async with (
        SessionHost.open(problems.session_tasks, SessionsConfig(most=request.param)) as host,
        ScoringPool.open(config, Problems({}, mixture=problems._mixture), base_dir=tmp_path, logs=tmp_path) as pool,
    ):
        pool._problems = problems
        yield Bench(game, problems, host, pool)
        assert host.num_open == 0, "every session is closed"


async def test_all_episodes_end_whatever_the_number_of_slots(bench: Bench) -> None:
    episodes = await bench.play()
    assert [episode.reward for episode in episodes] == [0.03, 0.06] * PROBLEMS
    assert {len(episode.turns) for episode in episodes} == {3} and {len(e.observations) for e in episodes} == {2}
    assert len(bench.game.steps) == 3 * len(episodes), "no turn is stepped twice"
    first = bench.engine.rounds[0]
    assert [request.indices for request in first] == [(0, 1)] * PROBLEMS, "first turns are sampled together"


async def test_episodes_with_lost_sessions_start_again_and_end_at_the_second_loss(bench: Bench) -> None:
    rounds = bench.engine.rounds

    def before() -> None:
        bench.game.dies = len(rounds) == 1

    bench.engine.before = before  # type: ignore[method-assign]
    episodes = await bench.play(samples=1)
    assert {episode.attempt for episode in episodes} <= {0, 1}
    assert any(episode.attempt == 1 for episode in episodes)
    assert [episode.reward for episode in episodes] == [0.03] * PROBLEMS
    bench.engine.before = lambda: setattr(bench.game, "dies", True)  # type: ignore[method-assign]
    assert [episode.reward for episode in await bench.play(samples=1)] == [0.125] * PROBLEMS


async def test_the_first_prompt_is_the_conversations_beginning_after_a_loss(game: CountingGame) -> None:
    episode = Episode(number=0, index=0, prompt_ids=np.array([1, 2], np.int32))

    def take(*ids: int) -> None:
        episode.take(
            FinishedRollout(
                lease_id=0,
                group_id=0,
                index=0,
                policy_version=0,
                completion_ids=np.array(ids, np.int32),
                behavior_logprobs=np.zeros(len(ids), np.float32),
                finish_reason=FinishReason.LENGTH if 9 in ids else FinishReason.STOP,
                sampling_s=0.0,
            )
        )

    answer: Answer = np.array([50], np.int32)
    take(3, 4)
    episode.go_on(answer, 0.5)
    take(5)
    episode.go_on(answer, 0.25)
    take(9)
    assert episode.prompt_ids.tolist() == [1, 2, 3, 4, 50, 5, 50] and episode.truncated
    episode.cut_behind(1)
    assert episode.prompt_ids.tolist() == [1, 2, 3, 4, 50] and [ids.tolist() for ids in episode.turns] == [[3, 4], [5]]
    assert (episode.turn_rewards, episode.num_tokens, episode.truncated, episode.attempt) == ([0.5], 3, False, 0)
    episode.go_on(np.array([60], np.int32))
    assert episode.prompt_ids.tolist() == [1, 2, 3, 4, 50, 5, 60]
    episode.begin_again()
    assert (episode.prompt_ids.tolist(), episode.turns, episode.attempt) == ([1, 2], [], 1)
