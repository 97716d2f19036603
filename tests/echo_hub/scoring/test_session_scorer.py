"""Turns of sessions are scored by the real session host, with an environment in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.core.accounting.effects import FirstTurn
from echo_hub.core.accounting.events import (
    RolloutContinued,
    RolloutRejected,
    RolloutScored,
    SessionDiverged,
    SessionLost,
)
from echo_hub.driving.event_queue import EventQueue
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.asked import AskedGroups, GroupBounds
from echo_hub.scoring.backlog import Backlog
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.scorer import Scorer, ScoringJob, Verdict
from echo_hub.scoring.session_scorer import SessionScorer
from echo_hub.sessions.host import SessionHost
from echo_hub.sessions.turns import PlayedTurn, SessionKey
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import DropReason, FinishReason
from tests.echo_hub.scoring.counting_game import CountingGame, problems_of

KEY = SessionKey(5, 1)


class Bench:
    def __init__(self, game: CountingGame, problems: Problems, host: SessionHost, pool: ScoringPool) -> None:
        self.game, self.problems, self.host = game, problems, host
        self.sessions = SessionScorer(host, problems, pool)
        self.pool = pool
        self.turns: list[PlayedTurn] = []

    def drawn(self, text: str) -> np.ndarray:
        codec = self.problems.codec
        return np.append(codec.encode_raw(text), codec.stop_ids[0]).astype(np.int32)

    async def say(self, text: str, key: SessionKey = KEY) -> object:
        """Send a reply, and return the verdict on it. The environment's answer becomes part of the conversation."""
        turn = PlayedTurn(completion_ids=self.drawn(text), logprobs=np.zeros(2, np.float32))
        verdict = await self.sessions.verdict("9-1", key, [*self.turns, turn])
        if isinstance(verdict, RolloutContinued):
            answered = PlayedTurn(completion_ids=turn.completion_ids, observation_ids=verdict.observation_ids)
            self.turns.append(answered)
        return verdict


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    game = CountingGame()
    problems = problems_of(game, PromptCodec.load(resolve_base("builtin:tiny")))
    config = HubConfig.model_validate({"task": {"name": "none"}, "tinker": {"enabled": True}})
    async with (
        SessionHost.open(problems.session_tasks, SessionsConfig()) as host,
        # The pool needs no processes, because the run has no judges.
        ScoringPool.open(config, Problems({}, mixture=problems._mixture), base_dir=tmp_path, logs=tmp_path) as pool,
    ):
        pool._problems = problems
        yield Bench(game, problems, host, pool)
    assert not game.open_sessions


async def test_turns_continue_with_their_rewards_until_the_environment_ends_the_episode(bench: Bench) -> None:
    first = await bench.say("7")
    assert isinstance(first, RolloutContinued) and first.turn_reward == 0.07
    assert bench.problems.codec.text(first.observation_ids).endswith("7=")
    assert isinstance(await bench.say("8"), RolloutContinued)
    assert await bench.say("9") == RolloutScored(rollout_id="9-1", reward=0.24)
    assert await bench.say("9") == RolloutScored(rollout_id="9-1", reward=0.24), "the answer is given again"
    assert [text for _, text in bench.game.steps] == ["7", "8", "9"]


async def test_a_rebuilt_session_that_answers_otherwise_has_diverged(bench: Bench) -> None:
    for text in ("1", "2"):
        await bench.say(text)
    bench.host.close(KEY)
    bench.game.luck = 50
    verdict = await bench.say("3")
    assert isinstance(verdict, SessionDiverged)
    assert (verdict.turn, verdict.turn_reward, verdict.is_loss) == (0, 0.01, False)
    assert verdict.observation_ids is not None
    assert bench.problems.codec.text(verdict.observation_ids).endswith("51=")
    assert verdict.if_lost == RolloutScored(rollout_id="9-1", reward=0.125)


async def test_a_session_that_keeps_dying_is_lost(bench: Bench) -> None:
    bench.game.dies = True
    verdict = await bench.say("3")
    assert isinstance(verdict, SessionLost) and verdict.is_loss and "died" in verdict.detail
    assert verdict.if_lost == RolloutScored(rollout_id="9-1", reward=0.125)


async def test_a_reward_out_of_bounds_is_a_failure_of_the_scorer(bench: Bench) -> None:
    for text in ("90", "90"):
        await bench.say(text)
    verdict = await bench.say("90")
    assert isinstance(verdict, RolloutRejected) and verdict.reason is DropReason.SCORER_FAILED


async def test_the_scorer_asks_the_host_with_the_whole_conversation(bench: Bench) -> None:
    """The first turn's content comes from memory, that of a later turn from the store. Session turns do not count as
    backlog, because they may wait for a slot. A payload that no engine can send never reaches the environment."""
    committed: dict[str, ScoringJob] = {}

    class Committed:
        async def load(self, rollout_ids: object) -> list[ScoringJob]:
            return [committed[name] for name in cast(list[str], rollout_ids)]

    def payload(text: str) -> RolloutPayload:
        ids = bench.drawn(text)
        return RolloutPayload(
            completion_ids=ids,
            behavior_logprobs=np.full(len(ids), -0.5, np.float32),
            finish_reason=FinishReason.STOP,
            sampling_s=0.1,
        )

    queue, backlog = EventQueue(), Backlog()
    bounds = SamplingBounds(vocabulary_size=128, max_tokens=4, stop_ids=frozenset(bench.problems.codec.stop_ids))
    scorer = Scorer(
        pool=bench.pool,
        bounds=GroupBounds(bounds, AskedGroups()),
        committed=Committed(),
        queue=queue,
        backlog=backlog,
        sessions=bench.sessions,
    )
    running = asyncio.create_task(scorer.run())

    async def next_verdict() -> Verdict:
        async with asyncio.timeout(30):
            while not (taken := queue.take()):
                await queue.wait()
        assert backlog.num_open == 0
        return cast(Verdict, taken[0])

    scorer.submit("1-2", FirstTurn(5, payload("4")), attempt=3)
    first = await next_verdict()
    assert isinstance(first, RolloutContinued) and first.rollout_id == "1-2"
    played = PlayedTurn(completion_ids=bench.drawn("4"), observation_ids=first.observation_ids)
    committed["2-2"] = ScoringJob(rollout_id="2-2", group_id=5, played=(played,), payload=payload("5"))
    scorer.submit("2-2", attempt=3)
    assert isinstance(await next_verdict(), RolloutContinued)
    assert [text for _, text in bench.game.steps] == ["4", "5"], "one session, stepped twice"
    scorer.submit("3-2", FirstTurn(5, payload("123456")))
    refused = await next_verdict()
    assert isinstance(refused, RolloutRejected) and refused.reason is DropReason.INVALID
    assert len(bench.game.steps) == 2
    running.cancel()
    await asyncio.wait([running])
    bench.host.close(SessionKey(5, 2, 3))
