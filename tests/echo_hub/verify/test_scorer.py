from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from echo_hub.base_model import PromptCodec, resolve_base
from echo_hub.core.events import RolloutRejected, RolloutScored
from echo_hub.core.payload import RolloutPayload
from echo_hub.tasks.base import Problem
from echo_hub.tasks.stream import ProblemStream
from echo_hub.verify.checks import SamplingBounds
from echo_hub.verify.problems import Problems
from echo_hub.verify.scorer import Scorer, ScoringJob, Verdict
from echo_shared.messages import DropReason, FinishReason


class NumberTask:
    """Any plug-in: the reward is the completion read as a number, and its score fails where that fails."""

    name = "number"

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()

    def sample(self, seed: int) -> Problem:
        return Problem(prompt=f"{seed % 1000}=")

    def score(self, problem: Problem, completion: str) -> float:
        self.threads.add(threading.current_thread())
        if completion == "13":
            raise LookupError("13 brings bad luck")
        return float("nan") if completion == "14" else float(completion) / 100


class Bench:
    """A scorer whose committed rollouts lie in a dict."""

    def __init__(self) -> None:
        self.codec = PromptCodec.load(resolve_base("builtin:tiny"))
        self.task = NumberTask()
        self.committed: dict[str, ScoringJob] = {}
        self.loaded: list[list[str]] = []
        self.verdicts: list[Verdict] = []
        stop = frozenset(self.codec.stop_ids)
        self.scorer = Scorer(
            problems=Problems(
                task=self.task,
                stream=ProblemStream(self.task, run_seed=0, heldout_problems=1),
                codec=self.codec,
                run_seed=0,
                num_heldout=1,
            ),
            bounds=SamplingBounds(vocabulary_size=64, max_tokens=4, stop_ids=stop),
            load=self.load,
        )

    def commit(self, rollout_id: str, text: str, *, whole: bool = True) -> None:
        ids = self.codec.encode_prompt(text)
        if whole:
            ids = np.append(ids, self.codec.stop_ids[0]).astype(np.int32)
        payload = RolloutPayload(
            completion_ids=ids,
            behavior_logprobs=np.full(len(ids), -0.5, np.float32),
            finish_reason=FinishReason.STOP,
            sampling_s=0.1,
        )
        self.committed[rollout_id] = ScoringJob(rollout_id=rollout_id, group_id=3, payload=payload)
        self.scorer.submit(rollout_id)

    async def load(self, rollout_ids: Sequence[str]) -> Sequence[ScoringJob]:
        self.loaded.append(list(rollout_ids))
        return [self.committed[each] for each in rollout_ids if each in self.committed]

    async def judge(self, count: int) -> list[Verdict]:
        """Runs the scorer until it has given so many verdicts."""
        enough = asyncio.Event()

        async def report(verdict: Verdict) -> None:
            self.verdicts.append(verdict)
            if len(self.verdicts) == count:
                enough.set()

        running = asyncio.create_task(self.scorer.run(report))
        async with asyncio.timeout(20):
            await enough.wait()
        running.cancel()
        await asyncio.wait([running])
        return self.verdicts


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_whatever_waits_is_loaded_and_scored_in_one_go(bench: Bench) -> None:
    for number in range(5):
        bench.commit(f"1-{number}", str(20 + number))
    assert await bench.judge(5) == [
        RolloutScored(rollout_id=f"1-{number}", reward=(20 + number) / 100) for number in range(5)
    ]
    assert bench.loaded == [[f"1-{number}" for number in range(5)]]
    assert threading.current_thread() not in bench.task.threads, "a slow scorer must not hold up the hub"


async def test_what_was_dropped_meanwhile_gets_no_verdict(bench: Bench) -> None:
    bench.scorer.submit("0-0")
    bench.commit("1-0", "50")
    assert await bench.judge(1) == [RolloutScored(rollout_id="1-0", reward=0.5)]


async def test_an_impossible_completion_is_rejected_without_a_score(bench: Bench) -> None:
    bench.commit("1-0", "77", whole=False)
    (verdict,) = await bench.judge(1)
    assert isinstance(verdict, RolloutRejected)
    assert (verdict.rollout_id, verdict.reason) == ("1-0", DropReason.INVALID)
    assert "claims to have stopped" in verdict.detail
    assert bench.task.threads == set()


@pytest.mark.parametrize(("text", "why"), [("13", "LookupError('13 brings bad luck')"), ("14", "nan")])
async def test_a_scorers_failure_is_never_a_reward(
    bench: Bench, text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.commit("1-0", text)
    bench.commit("1-1", "15")
    failed, scored = await bench.judge(2)
    assert isinstance(failed, RolloutRejected)
    assert (failed.rollout_id, failed.reason) == ("1-0", DropReason.SCORER_FAILED)
    assert why in failed.detail
    assert scored == RolloutScored(rollout_id="1-1", reward=0.15)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "1-0" in record.getMessage() and record.exc_info is not None
