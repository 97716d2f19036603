from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from echo_hub.config.sections import HubConfig
from echo_hub.config.task_sections import EvaluationConfig, TaskConfig
from echo_hub.core.accounting.effects import FirstTurn
from echo_hub.core.accounting.events import RolloutContinued, RolloutRejected, RolloutScored
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import FIRST_ANSWER_ID
from echo_hub.driving.event_queue import EventQueue
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring import backlog as backlog_module
from echo_hub.scoring.asked import AskedGroup, AskedGroups, GroupBounds
from echo_hub.scoring.backlog import Backlog
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.scoring.pool import PART_CALLS, ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.scorer import Scorer, ScoringJob, Verdict
from echo_shared.errors import ScorerError
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import DropReason, FinishReason
from tests.echo_hub.judge_endpoint import HANGS, FakeEndpoint
from tests.echo_hub.scoring.conftest import Opens


class Bench:
    def __init__(self, pool: ScoringPool) -> None:
        self.codec = PromptCodec.load(resolve_base("builtin:tiny"))
        self.committed: dict[str, ScoringJob] = {}
        self.loaded: list[list[str]] = []
        self.verdicts: list[Verdict] = []
        self.queue, self.backlog = EventQueue(), Backlog(is_limited=not pool.has_judges)
        bounds = SamplingBounds(vocabulary_size=128, max_tokens=4, stop_ids=frozenset(self.codec.stop_ids))
        self.asked = AskedGroups()
        self.scorer = Scorer(
            pool=pool,
            bounds=GroupBounds(bounds, self.asked),
            committed=self,
            queue=self.queue,
            backlog=self.backlog,
        )

    def commit(
        self,
        rollout_id: str,
        text: str,
        *,
        whole: bool = True,
        earlier_turns: tuple[NDArray[np.int32], ...] = (),
        group_id: int = 3,
    ) -> None:
        ids = self.codec.encode_prompt(text)
        if whole:
            ids = np.append(ids, self.codec.stop_ids[0]).astype(np.int32)
        payload = RolloutPayload(
            completion_ids=ids,
            behavior_logprobs=np.full(len(ids), -0.5, np.float32),
            finish_reason=FinishReason.STOP,
            sampling_s=0.1,
        )
        self.committed[rollout_id] = ScoringJob(
            rollout_id=rollout_id, group_id=group_id, earlier_turns=earlier_turns, payload=payload
        )
        self.scorer.submit(rollout_id)

    async def load(self, rollout_ids: Sequence[str]) -> Sequence[ScoringJob]:
        self.loaded.append(list(rollout_ids))
        return [self.committed[each] for each in rollout_ids if each in self.committed]

    async def judge(self, count: int) -> list[Verdict]:
        running = asyncio.create_task(self.scorer.run())
        async with asyncio.timeout(60):
            while len(self.verdicts) < count:
                await self.queue.wait()
                self.verdicts += cast(list[Verdict], self.queue.take())
        running.cancel()
        await asyncio.wait([running])
        return self.verdicts


@pytest.fixture
async def bench(numbers_pool: Opens) -> AsyncIterator[Bench]:
    async with numbers_pool(scorer_processes=1) as pool:
        yield Bench(pool)


async def test_waiting_rollouts_are_loaded_in_one_query(bench: Bench) -> None:
    count = 2 * PART_CALLS + 1
    for number in range(count):
        bench.commit(f"1-{number}", str(30 + number % 50))
    assert sorted(await bench.judge(count), key=lambda verdict: int(verdict.rollout_id[2:])) == [
        RolloutScored(rollout_id=f"1-{number}", reward=(30 + number % 50) / 100) for number in range(count)
    ]
    assert bench.loaded == [[f"1-{number}" for number in range(count)]]


async def test_it_is_behind_until_there_are_verdicts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "FAR_BEHIND", 2)
    for number in range(3):
        assert not bench.backlog.is_far
        bench.commit(f"1-{number}", "30")
    bench.scorer.submit("1-3")  # The rollout was dropped before the scorer could read it.
    assert bench.backlog.is_far
    await bench.judge(3)
    for number in range(4, 6):
        assert not bench.backlog.is_far, "none is left over"
        bench.commit(f"1-{number}", "30")


async def test_samples_of_requests_keep_their_own_limits_and_have_no_score(bench: Bench) -> None:
    """A tenant's request may have other stop tokens, and another length limit, than the run. No task scores the
    samples: the scorer of this run fails on texts that are no numbers."""
    sampling = SamplingParameters(temperature=0.3, max_tokens=2, stop_ids=bench.codec.stop_ids)
    for group_id, changes in ((FIRST_ANSWER_ID, {}), (FIRST_ANSWER_ID + 1, {"stop_ids": ()})):
        bench.asked.add(
            group_id,
            AskedGroup(prompt_ids=np.array([5], np.int32), seed=1, sampling=replace(sampling, **changes)),
        )
    bench.commit("1-0", "x", group_id=FIRST_ANSWER_ID)
    bench.commit("1-1", "xyz", group_id=FIRST_ANSWER_ID)
    bench.commit("1-2", "x", group_id=FIRST_ANSWER_ID + 1)
    good, *bad = sorted(await bench.judge(3), key=lambda verdict: verdict.rollout_id)
    assert good == RolloutScored(rollout_id="1-0", reward=0.0)
    details = [verdict.detail for verdict in bad if isinstance(verdict, RolloutRejected)]
    assert "wrong length" in details[0] and "4 tokens of 2" in details[0]
    assert "without a stop token" in details[1]


async def test_components_are_weighed_and_told_with_the_reward(numbers_pool: Opens) -> None:
    reward = {"format": r"\d\d", "weights": {"format": 0.5}}
    async with numbers_pool(scorer_processes=1, reward=reward) as pool:
        bench = Bench(pool)
        for index, text in enumerate(("50", "050")):
            bench.commit(f"1-{index}", text)
        verdicts = await bench.judge(2)
    first, second = sorted(verdicts, key=lambda verdict: verdict.rollout_id)
    assert first == RolloutScored(rollout_id="1-0", reward=1.0, components={"score": 0.5, "format": 1.0})
    assert second == RolloutScored(rollout_id="1-1", reward=0.5, components={"score": 0.5, "format": 0.0})


def judged(endpoint: FakeEndpoint, **settings: object) -> dict[str, object]:
    judge = {"kind": "llm", "url": endpoint.url, "model": "m", "attempts": 1, **settings}
    return {"weights": {"style": 0.5}, "judges": {"style": judge}}


async def test_a_judge_gives_a_component_or_the_rollout_has_no_reward(
    numbers_pool: Opens, endpoint: FakeEndpoint
) -> None:
    endpoint.rule = lambda said: "<score>4</score>" if "\n50\n" in said else "Nice."
    async with numbers_pool(scorer_processes=1, reward=judged(endpoint)) as pool:
        bench = Bench(pool)
        for index, text in enumerate(("50", "60", "13")):
            bench.commit(f"1-{index}", text)
        one, two, three = sorted(await bench.judge(3), key=lambda verdict: verdict.rollout_id)
    assert one == RolloutScored(rollout_id="1-0", reward=0.7, components={"score": 0.5, "style": 0.4})
    assert isinstance(two, RolloutRejected) and two.reason is DropReason.SCORER_FAILED and not two.killed_scorer
    assert "The judge style gave no verdict in 1 answers." in two.detail
    assert isinstance(three, RolloutRejected) and "13 brings bad luck" in three.detail
    assert len(endpoint.asked) == 2, "a rollout without a score is not judged"


async def test_a_rollout_that_waits_for_a_judge_delays_no_other(numbers_pool: Opens, endpoint: FakeEndpoint) -> None:
    endpoint.rule = lambda said: HANGS if "\n50\n" in said else "<score>4</score>"
    async with numbers_pool(scorer_processes=1, reward=judged(endpoint)) as pool:
        bench = Bench(pool)
        for index, text in enumerate(("50", "60", "70")):
            bench.commit(f"1-{index}", text)
        assert {verdict.rollout_id for verdict in await bench.judge(2)} == {"1-1", "1-2"}


async def test_a_rollout_dropped_meanwhile_gets_no_verdict(bench: Bench) -> None:
    bench.scorer.submit("0-0")
    bench.commit("1-0", "50")
    assert await bench.judge(1) == [RolloutScored(rollout_id="1-0", reward=0.5)]


async def test_an_impossible_completion_is_rejected_without_a_score(bench: Bench) -> None:
    bench.commit("1-0", "15", whole=False)
    (verdict,) = await bench.judge(1)
    assert isinstance(verdict, RolloutRejected)
    assert (verdict.rollout_id, verdict.reason) == ("1-0", DropReason.INVALID)
    assert "claims to have stopped" in verdict.detail


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("13", "13 brings bad luck"),
        ("15", "exit status 0"),
        ("x", "ValueError"),
        ("14", "The reward is nan"),
        ("1", "The reward is inf"),
        ("2", "The reward is 1e+30"),
        ("3", "The reward is '0.5'"),
        ("5", "The reward is None"),
        ("6", "The reward is -0.01; this task's are numbers from 0 to 1"),
    ],
)
async def test_a_scorers_failure_is_an_error_and_never_a_reward(
    bench: Bench, text: str, detail: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.commit("1-0", "50")
    bench.commit("1-1", text)
    bench.commit("1-2", "60")
    first, failed, last = await bench.judge(3)
    assert (first, last) == (
        RolloutScored(rollout_id="1-0", reward=0.5),
        RolloutScored(rollout_id="1-2", reward=0.6),
    )
    assert isinstance(failed, RolloutRejected)
    assert (failed.rollout_id, failed.reason) == ("1-1", DropReason.SCORER_FAILED)
    assert failed.killed_scorer == (text == "15")
    assert detail in failed.detail
    assert detail in caplog.text


async def test_failures_without_end_are_few_lines_that_steer_no_terminal(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = bench.scorer
    for _ in range(100_000):
        scorer._note_failures(3, "bad luck \x1b[2J\u202e\r\nand a second line")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) < 20 and all(line.isprintable() for line in lines)
    assert lines[-1].startswith("the scorer has failed on 262146 rollouts so far: bad luck ?[2J")


async def test_an_environments_answer_continues_with_the_episode(tmp_path: Path) -> None:
    task = TaskConfig(name="environment:guess", scorer_processes=1)
    config = HubConfig(task=task, evaluation=EvaluationConfig(problems=2))
    base_dir = resolve_base("builtin:tiny")
    problems = Problems.of_run(config, PromptCodec.load(base_dir))
    async with ScoringPool.open(config, problems, base_dir=base_dir, logs=tmp_path) as pool:
        bench = Bench(pool)
        wasted = bench.codec.encode_prompt("x")
        bench.commit("1-0", "x")
        bench.commit("2-0", "x", earlier_turns=(wasted,))
        bench.commit("3-0", "x", earlier_turns=(wasted, wasted))
        first, second, last = sorted(await bench.judge(3), key=lambda verdict: verdict.rollout_id)
    assert isinstance(first, RolloutContinued) and isinstance(second, RolloutContinued)
    assert bench.codec.decode(first.observation_ids) == "?="
    assert first.turn_reward + second.turn_reward < 0, "wasted turns lower the chance of winning"
    assert last == RolloutScored(rollout_id="3-0", reward=0.0)


async def test_scoring_ends_when_no_process_can_be_started(tmp_path: Path) -> None:
    config = HubConfig(task=TaskConfig(name="python:no_such_module:make"))
    base_dir = resolve_base("builtin:tiny")
    problems = Problems.of_run(HubConfig(), PromptCodec.load(base_dir))
    async with ScoringPool.open(config, problems, base_dir=base_dir, logs=tmp_path) as pool:
        bench = Bench(pool)
        bench.commit("1-0", "50")
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(60):
                await bench.scorer.run()
        assert caught.group_contains(ScorerError)


async def test_a_payload_in_memory_is_not_loaded(bench: Bench) -> None:
    bench.commit("1-0", "1 + 1 = 2")
    at_hand = bench.committed.pop("1-0")
    bench.scorer.submit("2-0", FirstTurn(at_hand.group_id, at_hand.payload))
    verdicts = await bench.judge(1)
    assert [verdict.rollout_id for verdict in verdicts] == ["2-0"]
    assert bench.loaded == [["1-0"]], "rollout 1-0 is gone"
