from __future__ import annotations

import asyncio

import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.events import GroupPrepared
from echo_hub.core.policy.mixture import Mixture
from echo_hub.driving.event_queue import EventQueue
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring import preparing
from echo_hub.scoring.preparing import GroupPreparation
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.task_problems import TaskProblems
from echo_hub.sessions.host import SessionHost
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import EnvironmentAway, Session
from echo_hub.tasks.stream import ProblemStream


async def next_of(queue: EventQueue) -> GroupPrepared:
    while not (events := queue.take()):
        await queue.wait()
    (event,) = events
    assert isinstance(event, GroupPrepared)
    return event


@pytest.mark.parametrize("together_s", [0.0, 60.0], ids=["one at a time", "all together"])
async def test_groups_are_answered_in_order_with_their_own_seeds(
    together_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "TOGETHER_S", together_s)
    config = HubConfig()
    problems = Problems.of_run(config, PromptCodec.of_run(config, resolve_base("builtin:tiny")))
    queue = EventQueue()
    preparation = GroupPreparation(problems, queue)
    for group_id in (0, 1, 2, 0):
        preparation.submit(group_id)
    working = asyncio.create_task(preparation.run())
    async with asyncio.timeout(60):
        events = [await next_of(queue) for _ in range(4)]
    preparation.submit(3)
    async with asyncio.timeout(60):
        assert (await next_of(queue)).group_id == 3, "what comes later, too"
    working.cancel()
    await asyncio.wait([working])
    assert [(event.group_id, event.seed) for event in events] == [(n, problems.seed(n)) for n in (0, 1, 2, 0)]
    assert [event.prompt_tokens for event in events] == [len(problems.prompt_ids(n)) for n in (0, 1, 2, 0)]
    assert len({event.seed for event in events}) == len({event.prompt for event in events}) == 3
    assert events[0].prompt == events[3].prompt, "a repeated prompt is recognized"


class SeldomThere:
    """An environment whose server answers only one in three requests for a problem."""

    name = "seldom"

    def __init__(self) -> None:
        self.num_asked = 0

    def sample(self, seed: int) -> Problem:
        self.num_asked += 1
        if self.num_asked % 3:
            raise EnvironmentAway("Nobody answers.", got=f"question {self.num_asked}")
        return Problem(prompt=f"{seed % 100}+")

    async def open(self, problem: Problem, seed: int) -> Session:
        raise AssertionError("no session is opened here")


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> Problems:
    """Return the problems of `SeldomThere`. One of them is held out."""
    monkeypatch.setattr(preparing, "FIRST_TRY_S", 0.01)
    codec = PromptCodec.of_run(HubConfig(), resolve_base("builtin:tiny"))
    environment = SeldomThere()
    stream = ProblemStream(environment, run_seed=1, heldout_problems=1)
    task = TaskProblems(task=environment, stream=stream, codec=codec, max_tokens=4)
    return Problems({"": task}, mixture=Mixture.of(1, [1.0]))


async def test_a_hub_starts_without_its_environment(seldom: Problems) -> None:
    async with SessionHost.open(seldom.session_tasks, HubConfig().sessions) as host:
        host.drawing_waits(seldom.prepare_at_start())
        assert host.absence == "Nobody answers. (question 1)"
        assert seldom.held_out == {}, "processes that score need no held-out problem of an environment with state"
        waiting = asyncio.create_task(host.problems_known())
        queue = EventQueue()
        preparation = GroupPreparation(seldom, queue, host)
        working = asyncio.create_task(preparation.run())
        preparation.submit(0)
        async with asyncio.timeout(60):
            await waiting
            assert (await next_of(queue)).group_id == 0
        working.cancel()
        await asyncio.wait([working])
        assert host.absence == ""
        assert len(seldom.tasks[""].stream.held_out.seeds) == 1


async def test_a_group_waits_for_an_environment_that_is_away(seldom: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    problems, queue = seldom, EventQueue()
    async with SessionHost.open(problems.session_tasks, HubConfig().sessions) as host:
        told = []
        monkeypatch.setattr(host, "drawing_waits", told.append)
        preparation = GroupPreparation(problems, queue, host)
        for group_id in (0, 1, 2):
            preparation.submit(group_id)
        working = asyncio.create_task(preparation.run())
        async with asyncio.timeout(60):
            events = [await next_of(queue) for _ in range(3)]
        working.cancel()
        await asyncio.wait([working])
    assert [event.group_id for event in events] == [0, 1, 2]
    assert told[:3] == ["Nobody answers. (question 1)", "Nobody answers. (question 2)", ""]


async def test_the_operator_is_told_that_no_problem_can_be_drawn() -> None:
    async with SessionHost.open({}, HubConfig().sessions) as host:
        host.drawing_waits("nobody\nanswers")
        assert host.absence == "nobody?answers"
        assert host.away_since is not None
        host.drawing_waits("")
        assert (host.absence, host.away_since) == ("", None)
