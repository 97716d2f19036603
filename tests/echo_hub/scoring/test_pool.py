from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from aiohttp import web

from echo_hub.config.sections import HubConfig
from echo_hub.config.task_sections import TaskConfig
from echo_hub.evaluation.by_hub import Generated, HeldOut, evaluate, scored_by
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import PART_CALLS, ScorerDeath, ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.store.reports import read_evaluations
from echo_hub.store.store import Store
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.errors import ScorerError
from echo_shared.process import process_memory
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.wire.messages import FinishReason
from tests.echo_hub.scoring.conftest import Opens, pool_processes

CODEC = PromptCodec.load(resolve_base("builtin:tiny"))


def calls(*numbers: int) -> list[tuple[Any, ...]]:
    """Return the arguments of `respond`: for each number, a conversation of one turn, in group 3."""
    return [(3, [CODEC.encode_prompt(str(number))]) for number in numbers]


async def rewards(pool: ScoringPool, *numbers: int) -> list[Any]:
    async with asyncio.timeout(60):
        return await pool.call("respond", calls(*numbers))


async def test_results_come_in_the_order_of_the_calls(numbers_pool: Opens) -> None:
    many = [*range(22, 100)] * 5
    assert len(many) > 2 * PART_CALLS
    async with numbers_pool() as pool:
        assert await rewards(pool, *many) == [number / 100 for number in many]
        together = await asyncio.gather(*(rewards(pool, number) for number in range(22, 60)))
        assert together == [[number / 100] for number in range(22, 60)]
        assert await rewards(pool) == []
        results = await rewards(pool, 15, 15, 15, 15, 60)
        assert [isinstance(result, ScorerError) for result in results] == [True] * 4 + [False]


async def test_invalid_rewards_are_errors_in_training_and_evaluation(numbers_pool: Opens) -> None:
    """The values inf, 1e30, text, None, a value below the lowest reward, and NaN are invalid. True counts as 1."""
    texts = ["1", "2", "3", "5", "6", "14", "4", "50"]
    async with numbers_pool(scorer_processes=1) as pool:
        for method in ("respond", "heldout_respond"):
            given = await pool.call(method, [(1, [CODEC.encode_prompt(text)]) for text in texts])
            assert [isinstance(each, ScorerError) for each in given] == [True] * 6 + [False] * 2
            assert given[6:] == [1.0, 0.5]


async def test_an_evaluation_with_such_rewards_is_in_the_store(numbers_pool: Opens) -> None:
    texts = ["14", "1", "2", "50", "4"]

    async def generate(requests: Sequence[GroupRequest], *, greedy: bool) -> Generated:
        drawn = [
            FinishedRollout(
                lease_id=request.lease_id,
                group_id=request.group_id,
                index=index,
                policy_version=request.policy_version,
                completion_ids=CODEC.encode_prompt(texts[index]),
                behavior_logprobs=np.zeros(len(texts[index]), np.float32),
                finish_reason=FinishReason.STOP,
                sampling_s=0.0,
            )
            for request in requests
            for index in ((3,) if greedy else request.indices)
        ]
        return Generated(rollouts=[replace(one, index=0) if greedy else one for one in drawn], seconds=1.0)

    prompts = [CODEC.encode_prompt("7="), CODEC.encode_prompt("8=")]
    heldout = HeldOut(
        prompts=prompts,
        run_seed=3,
        samples=5,
        temperature=1.0,
        max_tokens=4,
        stop_ids=(1,),
        rewards=RewardBounds(),
    )
    async with numbers_pool(scorer_processes=1) as pool:
        measured = await evaluate(0, heldout, generate=generate, judge=scored_by(pool))
    store = Store.open("sqlite://")
    store.record_evaluations(measured)
    (_, sampled) = store.read(read_evaluations)
    store.close()
    assert (sampled.num_problems, sampled.num_unscored) == (2, 6)
    assert (sampled.accuracy, sampled.mean_reward) == (0.5, 0.75)


posix = pytest.mark.skipif(os.name == "nt", reason="signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="no memory limit")


TOO_LONG, NO_MEMORY, CRASHED = "The scorer took too long.", "The scorer ran out of memory.", "The scorer crashed."
ENDED = "The scorer ended its process."
FAILURES = [
    (13, "The scorer failed.", "13 brings bad luck"),
    (15, ENDED, "exit status 0"),
    (17, TOO_LONG, "scorer_timeout_s = 1"),
    (20, ENDED, "exit status 3"),
]
ON_POSIX = [
    (11, ENDED, "exit status 0"),
    (12, "The scorer's process died.", "with its pipe closed"),
    (16, CRASHED, "killed by SIGABRT"),
    (18, TOO_LONG, "scorer_timeout_s = 1"),
    (130, CRASHED, "killed by SIGSEGV"),
    (133, NO_MEMORY, "killed by SIGABRT: terminate called"),
]
ON_LINUX = [(number, NO_MEMORY, "MemoryError at task.scorer_memory_mb = 2048") for number in (19, 132)]


async def test_each_failure_is_reported_and_is_that_calls_alone(numbers_pool: Opens) -> None:
    failures = FAILURES + ON_POSIX * (os.name != "nt") + ON_LINUX * (sys.platform == "linux")
    async with numbers_pool(scorer_processes=1) as pool:
        for number, what, got in failures:
            one, bad, other, another = await rewards(pool, 50, number, 51, 52)
            assert [one, other, another] == [0.5, 0.51, 0.52], number
            assert isinstance(bad, ScorerError)
            assert bad.what == what and got in str(bad.got), number
        assert await rewards(pool, 53) == [0.53]

        # Calls that were sent before a death are scored by the next process.
        numbers = [*range(22, 22 + PART_CALLS)] * 4
        numbers[PART_CALLS + 5] = 20
        found = await rewards(pool, *numbers)
    assert isinstance(found.pop(PART_CALLS + 5), ScorerDeath)
    numbers.pop(PART_CALLS + 5)
    assert found == [number / 100 for number in numbers]


@posix
async def test_an_out_of_memory_kill_is_detected_by_the_kernels_counter(
    numbers_pool: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process cannot tell who killed it with SIGKILL. If the kernel's count of out-of-memory kills has risen, or if
    there is no such count, the pool reports a lack of memory."""
    memory = "The scorer's process was killed, most likely because the machine ran out of memory."
    other = "The scorer's process was killed, and not for its memory."
    counts = iter([0, 1, 7, 7, None, None])
    monkeypatch.setattr(process_memory, "kernel_kills", lambda: next(counts, None))
    for what in (memory, other, memory):
        async with numbers_pool(scorer_processes=1) as pool:
            (killed,) = await rewards(pool, 131)
        assert isinstance(killed, ScorerDeath)
        assert killed.what == what and "SIGKILL" in str(killed.got)


@posix
async def test_a_pattern_that_backtracks_for_ever_costs_that_completion_alone(numbers_pool: Opens) -> None:
    reward = {"format": r"(\d+)+x|\d\d", "weights": {"format": 0.5}}
    texts = ("50", "0" * 40 + "60", "051")
    async with numbers_pool(scorer_processes=1, reward=reward) as pool:
        first, stuck, last = await pool.rewards("respond", [(3, [CODEC.encode_prompt(text)]) for text in texts])
    assert (first, last) == (1.0, 0.51)
    assert isinstance(stuck, ScorerDeath) and stuck.what == "The scorer took too long."


@linux
async def test_after_an_out_of_memory_kill_the_call_is_repeated_alone(numbers_pool: Opens) -> None:
    async with numbers_pool(scorer_processes=1, scorer_memory_mb=512, scorer_timeout_s=30.0) as pool:
        assert await rewards(pool, *[10] * 5, 50) == [0.1] * 5 + [0.5]
        (alone,) = await rewards(pool, 19)
        assert isinstance(alone, ScorerDeath) and "scorer_memory_mb = 512" in str(alone)


async def test_calls_run_in_other_processes_without_torch(numbers_pool: Opens) -> None:
    async with numbers_pool(scorer_processes=1) as pool:
        (reward,) = await rewards(pool, 21)
        pid = int(reward * 2**22)
        (process,) = pool_processes()
        assert process.pid == (psutil.Process(pid).ppid() if sys.platform == "linux" else pid)
        assert pid != os.getpid()
        assert not [each.path for each in psutil.Process(pid).memory_maps() if "libtorch" in each.path]

        # If an idle process dies, no call fails.
        processes = [process, *process.children()]
        processes[-1].kill()
        await asyncio.to_thread(psutil.wait_procs, processes, 20)
        assert await rewards(pool, 51, 52) == [0.51, 0.52]


async def test_closing_ends_all_processes_even_in_an_endless_loop(numbers_pool: Opens) -> None:
    async with numbers_pool(scorer_timeout_s=1000.0) as pool:
        await rewards(pool, *[50] * PART_CALLS * 4)
        processes = pool_processes()
        stuck = asyncio.create_task(pool.call("respond", calls(17, 18)))
        assert len(processes) == 2
    assert psutil.wait_procs(processes, timeout=20)[1] == []
    stuck.cancel()


async def test_a_pool_that_cannot_make_its_task_gives_the_reason(tmp_path: Path) -> None:
    config = HubConfig(task=TaskConfig(name="python:no_such_module:make"))
    problems = Problems.of_run(HubConfig(), CODEC)
    async with ScoringPool.open(config, problems, base_dir=resolve_base("builtin:tiny"), logs=tmp_path) as pool:
        for _ in range(2):
            with pytest.raises(ScorerError, match="cannot make the run's task") as caught:
                await rewards(pool, 50)
            assert "no_such_module" in str(caught.value)


ASKING = '''
"""Each completion is a path of the test's service, or ends its process."""
import os
from pathlib import Path

import aiohttp

from echo_hub.tasks.base import Problem

PORT = Path(__file__).with_name("port")


class Asking:
    name = "asking"

    def sample(self, seed):
        return Problem(prompt=f"{seed % 1000}=")

    async def score(self, problem, completion):
        if completion == "13":
            os._exit(13)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{PORT.read_text()}/{completion}") as answer:
                return float(await answer.text())


def make(options):
    return Asking()
'''


class Service:
    """A web service that scores. It answers requests when `size` of them wait at the same time, but never answers
    `/17`."""

    def __init__(self, size: int) -> None:
        self.size, self.at_once, self.most = size, 0, 0
        self.all_here, self.over = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        if self.at_once >= self.size:
            self.all_here.set()
        try:
            await (self.all_here.wait() if request.path != "/17" else self.over.wait())
        finally:
            self.at_once -= 1
        return web.Response(text=str(int(request.path[1:]) / 100))


@asynccontextmanager
async def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, **task: Any) -> AsyncIterator[Any]:
    (tmp_path / "asking_task.py").write_text(ASKING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    service, app = Service(size), web.Application()
    app.router.add_get("/{number}", service.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (tmp_path / "port").write_text(str(runner.addresses[0][1]))
    settings = {"name": "python:asking_task:make", "scorer_processes": 1, **task}
    config = HubConfig.model_validate({"task": settings, "evaluation": {"problems": 2}})
    problems, base_dir = Problems.of_run(config, CODEC), resolve_base("builtin:tiny")
    try:
        async with ScoringPool.open(config, problems, base_dir=base_dir, logs=tmp_path / "logs") as pool:
            yield pool, service
    finally:
        service.over.set()
        await runner.cleanup()


async def test_64_scorers_wait_for_a_service_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking(tmp_path, monkeypatch, 64, scorer_timeout_s=50.0) as (pool, service):
        assert await rewards(pool, *range(20, 100)) == [number / 100 for number in range(20, 100)]
        assert service.most == 64


async def test_among_parallel_calls_a_timeout_affects_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking(tmp_path, monkeypatch, 1, scorer_timeout_s=2.0) as (pool, _):
        first, late, last = await rewards(pool, 20, 17, 21)
        assert (first, last) == (0.2, 0.21)
        assert isinstance(late, ScorerError) and "took too long" in str(late)
