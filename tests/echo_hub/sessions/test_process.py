"""Sessions in processes: their answers, the causes of their failures, and leftovers after their end."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import psutil
import pytest

from echo_hub.sessions.openings import Openings
from echo_hub.sessions.process import ProcessEnvironment, ProcessSession
from echo_hub.sessions.program_process import ProgramPlan, SessionProcess
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import (
    Ending,
    EnvironmentAway,
    EpisodeRefused,
    Observation,
    Opening,
    ProcessDied,
    Reply,
    SessionGone,
)
from echo_shared.errors import ConfigError
from tests.echo_hub.sessions.conftest import wait_until_dead

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


async def begun(environment: ProcessEnvironment, seed: int = 3) -> ProcessSession:
    session = await environment.open(environment.sample(seed), 0)
    assert await session.reset() == Opening(text="roll")
    return session


def num_closed(environment: ProcessEnvironment) -> int:
    marks = Path(environment.process.plan.options["closed"])
    return marks.read_text().count("closed") if marks.exists() else 0


async def rolled(session: ProcessSession) -> str:
    response = await session.step(Reply(text="roll"))
    assert isinstance(response, Observation) and response.turn_reward == 0.125
    return response.text


async def test_sessions_share_no_random_numbers(dice: ProcessEnvironment) -> None:
    sessions = [await begun(dice, seed) for seed in (3, 4, 3)]
    first, second, third = [[await rolled(session) for _ in range(3)] for session in sessions]
    assert first == third != second
    assert await sessions[0].score() == Ending(reward=0.375)
    assert await sessions[1].step(Reply(text="end")) == Ending(reward=0.5)
    for session in sessions:
        await session.close()


async def test_a_session_is_closed_by_the_game_before_its_process_ends(dice: ProcessEnvironment) -> None:
    before = num_closed(dice)
    await (await begun(dice)).close()
    assert num_closed(dice) == before + 1


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        ("raise", "a mistake in the game"),
        ("die", "ended by signal 9 (SIGKILL)"),
        ("nonsense", "no valid answer"),
        pytest.param("eat", "ran out of memory", marks=linux_only),
    ],
)
async def test_a_failed_step_names_its_cause(dice: ProcessEnvironment, reply: str, cause: str) -> None:
    session = await begun(dice)
    with pytest.raises(SessionGone, match=cause.replace("(", r"\(").replace(")", r"\)")):
        await session.step(Reply(text=reply))
    await session.close()


async def test_a_refused_episode_says_so(dice: ProcessEnvironment) -> None:
    session = await begun(dice)
    with pytest.raises(EpisodeRefused, match="branches are not supported"):
        await session.step(Reply(text="refuse"))
    await session.close()


async def test_an_endless_step_ends_with_its_session(dice: ProcessEnvironment) -> None:
    session = await begun(dice)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.step(Reply(text="loop")), 0.05)
    await asyncio.wait_for(session.close(), 10.0)
    assert not [child for child in psutil.Process(dice.process.pid).children() if child.cpu_times().user > 1.0]


@linux_only
async def test_processes_of_a_session_end_with_it(dice: ProcessEnvironment) -> None:
    other = await begun(dice)
    session = await begun(dice)
    response = await session.step(Reply(text="start"))
    assert isinstance(response, Observation)
    started = psutil.Process(int(response.text))
    await session.close()
    wait_until_dead([started])
    assert await rolled(other)
    await other.close()


async def test_problems_are_drawn_once(dice: ProcessEnvironment) -> None:
    problem = dice.sample(11)
    assert problem.prompt == "roll" and problem.metadata["seed"] == 11
    assert dice.sample(11) == problem and problem.metadata["drawn_in"] != dice.process.pid


def of(**changes: object) -> ProcessEnvironment:
    fields = {"way": "fork", "adapter": "tests.echo_hub.sessions.dice:make", "python": "", "options": {}}
    plan = ProgramPlan(**{**fields, **changes})  # type: ignore[arg-type]
    return ProcessEnvironment(
        "dice", SessionProcess(plan), openings=Openings(None, "dice"), declared={}, drawing_s=30.0
    )


async def test_a_dead_process_takes_its_sessions_along_and_is_started_again() -> None:
    environment = of()
    try:
        session = await begun(environment)
        pid = environment.process.pid
        assert pid is not None
        children = psutil.Process(pid).children()
        psutil.Process(pid).kill()
        assert children
        wait_until_dead(children)
        with pytest.raises(ProcessDied, match="process has died"):
            await session.step(Reply(text="roll"))
        await session.close()
        again = await begun(environment)
        assert environment.process.pid != pid
        await again.close()
    finally:
        environment.stop()
    assert environment.process.pid is None


async def test_nothing_starts_after_the_end_for_sessions_that_were_given_up() -> None:
    environment = of(options={"import_s": 0.5})
    openings = [asyncio.create_task(environment.open(Problem(prompt="roll"), 0)) for _ in range(3)]
    await asyncio.sleep(0.1)
    for opening in openings:
        opening.cancel()
    await asyncio.wait(openings)
    await asyncio.to_thread(environment.stop)
    await asyncio.sleep(0.2)
    assert environment.process.pid is None


def test_a_refused_problem_waits_like_others() -> None:
    environment = of(options={"refused": 4})
    try:
        with pytest.raises(SessionGone, match="no such problem"):
            environment.sample(4)
    finally:
        environment.stop()


def test_a_hub_without_files_waits(dice: ProcessEnvironment) -> None:
    resource = pytest.importorskip("resource")
    assert dice.sample(12)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as next_file:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_file.fileno() + 1, hard))
            with pytest.raises(EnvironmentAway, match="Too many open files"):
                dice.sample(13)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert dice.sample(13)


@pytest.mark.parametrize("waits_s", [0.0, 1.0])
async def test_a_session_that_cannot_start_is_no_fault_of_its_episode(tmp_path: Path, waits_s: float) -> None:
    environment = of(directory=tmp_path / "own")
    try:
        await (await begun(environment)).close()
        (tmp_path / "own" / "session-3").touch()
        session = await environment.open(environment.sample(3), 0)
        await asyncio.sleep(waits_s)
        with pytest.raises(EnvironmentAway, match=r"cannot be started.*File exists"):
            await session.reset()
        await session.close()
    finally:
        environment.stop()


async def test_sessions_can_share_a_process(tmp_path: Path) -> None:
    marks = tmp_path / "there"
    environment = of(
        way="shared",
        adapter="tests.echo_hub.sessions.dice:make_later",
        options={"away_unless": str(marks), "closed": str(tmp_path / "closed.txt")},
    )
    try:
        problem = environment.sample(3)
        assert problem.metadata["drawn_in"] == environment.process.pid
        session = await environment.open(problem, 0)
        with pytest.raises(EnvironmentAway, match="nothing listens there"):
            await session.reset()
        await session.close()
        marks.touch()
        session = await begun(environment)
        assert await rolled(session)
        with pytest.raises(SessionGone, match="a mistake in the game"):
            await session.step(Reply(text="raise"))
        await session.close()
        assert num_closed(environment) == 2
    finally:
        environment.stop()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"adapter": "tests.echo_hub.sessions.no_such_game:make"}, "No module named"),
        ({"adapter": "echo_hub.sessions.inside.textarena_game:make", "python": "/no/such/python"}, "cannot be started"),
    ],
)
def test_an_environment_that_cannot_be_made_is_an_error_of_settings(changes: dict[str, str], text: str) -> None:
    environment = of(**changes)
    try:
        with pytest.raises(ConfigError) as caught:
            environment.sample(1)
        assert text in str(caught.value)
    finally:
        environment.stop()
