"""Games of the real TextArena, in the interpreter that has it: many games at once, killed games, and games with random
numbers of their own."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.sessions.host import SessionHost
from echo_hub.sessions.kinds import SessionPlace, make_any_task
from echo_hub.sessions.openings import Openings
from echo_hub.sessions.process import ProcessEnvironment
from echo_hub.sessions.program_process import ProgramPlan, SessionProcess
from echo_hub.sessions.turn_codec import SessionTask, TurnCodec
from echo_hub.sessions.turns import Answer, Diverged, EpisodeEnd, NextTurn, PlayedTurn, SessionKey
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Reply, Response
from echo_shared.errors import ConfigError
from tests.agents import agents_python
from tests.echo_hub.sessions.conftest import wait_until_dead
from tests.echo_hub.sessions.test_host import codec, turn

ROOT: Final = Path(__file__).resolve().parents[4]
TURNS: Final = 8
MOVES: Final = {
    "2048-v0": ["[Up]", "[Left]", "[Down]", "[Right]"],
    "Blackjack-v0": ["[Hit]", "[Stand]", "[Stand]"],
    "Minesweeper-v0": [f"[{row} {column}]" for row in range(8) for column in range(8)],
}
ALONE: Final = """
import json, sys, textarena
for game, seed, moves in json.load(sys.stdin):
    played = textarena.make(game)
    played.reset(num_players=1, seed=seed)
    said = [played.get_observation()[1].strip()]
    for move in moves:
        is_over, _ = played.step(move)
        said.append(played.close()[0][0] if is_over else played.get_observation()[1].strip())
        if is_over:
            break
    print(json.dumps(said))
"""
"""Program that plays games one after the other with TextArena, without Echo."""


def game_of(name: str, **options: object) -> ProcessEnvironment:
    config = SessionsConfig(python=str(agents_python()), trusted=True)
    game = make_any_task(f"textarena:{name}", options, SessionPlace(config=config))
    assert isinstance(game, ProcessEnvironment)
    return game


def moves_of(game: str, seed: int) -> list[str]:
    return random.Random(seed).choices(MOVES[game], k=TURNS)


async def transcript(environment: ProcessEnvironment, game: str, seed: int) -> list[Any]:
    """Play a session while other sessions run, and return all its texts."""
    session = await environment.open(Problem(prompt="", metadata={"seed": seed}), 0)
    said: list[Any] = [(await session.reset()).text]
    for move in moves_of(game, seed):
        response: Response = await session.step(Reply(text=move))
        said.append(response.reward if isinstance(response, Ending) else response.text)
        if isinstance(response, Ending):
            break
        await asyncio.sleep(0)
    await session.close()
    return said


async def test_games_at_once_go_as_each_goes_alone() -> None:
    wanted = [(game, seed, moves_of(game, seed)) for game in MOVES for seed in range(32)]
    alone = subprocess.run(  # noqa: ASYNC221 - Nothing else runs meanwhile.
        [agents_python(), "-c", ALONE], input=json.dumps(wanted), capture_output=True, text=True, check=True
    )
    expected = [json.loads(line) for line in alone.stdout.splitlines()]
    found: list[Any] = []
    for game in MOVES:
        environment = game_of(game, observation="all")
        try:
            found += await asyncio.gather(*(transcript(environment, game, seed) for seed in range(32)))
        finally:
            environment.stop()
    assert found == expected


def test_a_game_for_two_players_is_refused() -> None:
    game = game_of("KuhnPoker-v0")
    with pytest.raises(ConfigError) as caught:
        game.sample(1)
    assert "number of players has to be 2" in str(caught.value)
    game.stop()


async def answered(host: SessionHost, key: SessionKey, problem: Problem, turns: Sequence[PlayedTurn]) -> Answer:
    return await host.respond(key, "", problem=problem, seed=0, turns=turns)


async def test_a_whole_game_ends_with_the_games_reward() -> None:
    game = game_of("GuessTheNumber-v0", arguments={"max_number": 4})
    problem = game.sample(5)
    assert "between 1 and 4" in problem.prompt
    task = SessionTask(environment=game, codec=TurnCodec(codec(), max_tokens=8))
    async with SessionHost.open({"": task}, SessionsConfig()) as host:
        turns: list[PlayedTurn] = []
        for guess in ("[1]", "[9]", "[2]", "[3]", "[4]"):
            answer = await answered(host, SessionKey(1, 0), problem, [*turns, turn(guess)])
            if isinstance(answer, EpisodeEnd):
                break
            assert isinstance(answer, NextTurn)
            turns.append(replace(turn(guess), observation_ids=answer.observation_ids))
        assert answer == EpisodeEnd(ending=Ending(reward=1.0))
        texts = [codec().decode(one.observation_ids) for one in turns]
        assert "outside the range" in texts[1] and "[9]" not in texts[1] and texts[0].count("number") == 1


async def test_a_game_of_chance_keeps_the_turns_that_come_out_equal() -> None:
    """The game draws from the system before its third step and later ones, so a rebuilt session differs there."""

    def launch(command: Sequence[str], directory: Path, /) -> list[str]:
        paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "hub"))
        return ["env", f"PYTHONPATH={paths}", *command]

    plan = ProgramPlan(
        way="fork",
        adapter="tests.echo_hub.sessions.inside.chance:make",
        python=str(agents_python()),
        options={"game": "2048-v0", "arguments": {}, "observation": "new", "broken_off": 0.0, "chance_from": 2},
        launch=launch,
    )
    game = ProcessEnvironment(
        "chance", SessionProcess(plan), openings=Openings(None, "chance"), declared={}, drawing_s=60.0
    )
    spacious = copy(codec())
    spacious.context_tokens = 65_536
    task = SessionTask(environment=game, codec=TurnCodec(spacious, max_tokens=8))
    async with SessionHost.open({"": task}, SessionsConfig()) as host:
        problem, key = game.sample(5), SessionKey(1, 0)
        turns: list[PlayedTurn] = []

        async def play_on(count: int) -> None:
            for move in MOVES["2048-v0"][:count]:
                answer = await answered(host, key, problem, [*turns, turn(move)])
                assert isinstance(answer, NextTurn)
                turns.append(replace(turn(move), observation_ids=answer.observation_ids))

        await play_on(4)
        for _ in range(2):
            sessions = psutil.Process(game.process.pid).children()
            for session in sessions:
                session.kill()
            wait_until_dead(sessions)
            answer = await answered(host, key, problem, [*turns, turn("[Up]")])
            assert isinstance(answer, Diverged) and answer.is_loss and 2 <= answer.turn < len(turns)
            assert isinstance(answer.answer, NextTurn)
            last = replace(turns[answer.turn], observation_ids=answer.answer.observation_ids)
            turns[answer.turn :] = [last]
            await play_on(3)
        kinds = [note.kind for note in host.history(1)]
        assert kinds.count("rebuilt") == 2 and kinds.count("diverged") == 2
