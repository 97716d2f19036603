"""Kill every process on which an episode depends, and count turns that are lost or happen twice.

A run of TextArena's Blackjack plays on while four processes are killed in turn: its hub, the process that forks all
sessions, one session, and a node. The model has never seen the game, and most episodes end with the second invalid
move. In a run with an OpenEnv server, whose episodes have six turns, the server is killed. After each kill the run must
score further turns before the next kill.

At the end each finished episode is played again, turn by turn, in a new session. If a turn was lost or happened twice,
a later answer or the reward differs. `lost_or_twice` counts such episodes, turns that were received twice, and rollouts
without a counted end.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness.live_site import LOOK_S, ServedRun, live_site
from benchmarks.harness.site import RunFailed, Settings, free_port
from echo_hub.config.file import load_config
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.scoring.problems import Problems
from echo_hub.sessions.host import SessionHost
from echo_hub.sessions.turns import EpisodeEnd, NextTurn, PlayedTurn, SessionKey
from echo_hub.store.browsing import read_tokens
from echo_hub.store.store import Store

GAME_KILLS: Final = 24
SERVER_KILLS: Final = 6
TURNS_BETWEEN: Final = 8
"""Number of turns that the run must score after a kill."""
WITHIN_S: Final = 240.0
_PROGRAMS: Final = ("cage/launcher.py", "sessions/inside/program.py")
_SMALL: Final[Settings] = {
    "learner": {"threads": 1},
    "server": {"port": 0, "heartbeat_s": 1.0},
    "trust": {"verifier": "off"},
    "model": {"base": "builtin:small"},
    "sampling": {"max_tokens": 12},
    "training": {"steps": 100_000, "groups_per_step": 2, "group_size": 4, "lora_rank": 4},
    "evaluation": {"problems": 2},
    "leases": {"deadline_s": 20.0},
}


class AgentsRun(ServedRun):
    """A run with a task of several turns, served by a hub, with two nodes. Its processes can be killed."""

    def num_scored(self) -> int:
        return int(self.rows("SELECT count(*) FROM rollouts WHERE scored_at IS NOT NULL")[0][0])

    async def go_on(self) -> None:
        """Wait until the run has scored TURNS_BETWEEN turns more than now, that is, since the last kill. Raises
        RunFailed.
        """
        wanted, give_up_at = self.num_scored() + TURNS_BETWEEN, time.monotonic() + WITHIN_S
        while self.num_scored() < wanted:
            if self.hub.process.returncode is not None or time.monotonic() > give_up_at:
                raise RunFailed(f"the run does not continue: {self.num_scored()} of {wanted} turns, see {self.run}")
            await asyncio.sleep(LOOK_S)

    async def kill_host(self) -> None:
        """Kill the hub's process that forks all sessions of the environment."""
        await self.kill_child(lambda child: _forks(child) and not _forks(child.parent()))

    async def kill_session(self) -> None:
        await self.kill_child(lambda child: _forks(child) and _forks(child.parent()))


def _forks(process: psutil.Process | None) -> bool:
    """Return True if the process is the server that forks sessions, or one of its forks. In a cage (the sandbox of
    sessions) both run under the name of the cage's launcher.
    """
    return process is not None and any(word.endswith(_PROGRAMS) for word in process.cmdline()[:4])


@asynccontextmanager
async def opened(name: str, python: str, task: Mapping[str, Any], seed: int) -> AsyncIterator[AgentsRun]:
    with tempfile.TemporaryDirectory(prefix="echo-agents-") as scratch:
        async with live_site(Path(scratch)) as site:
            directory = RunDirectory(Path(scratch) / name)
            own: Settings = {"task": task, "sessions": {"python": python}, "run": {"name": name, "seed": seed}}
            make_run(directory, load_config(None, {**_SMALL, **own}))
            run = AgentsRun(site)
            run.run = directory.root
            with contextlib.redirect_stdout(None):  # `live_site` prints the processes' output, for tests only.
                await run.serve()
                for number in (1, 2):
                    await run.node(f"node{number}")
                yield run


async def game_kills(seed: int, *, python: str, kills: int = GAME_KILLS) -> dict[str, Any]:
    """Kill the hub, the process that forks sessions, a session and a node of a TextArena run in turn."""
    options = {"arguments": {"num_hands": 3}}
    async with opened("game", python, {"name": "textarena:Blackjack-v0", "options": options}, seed) as run:
        await run.go_on()
        for number in range(kills):
            kill_node = partial(run.kill_node, f"node{1 + number // 4 % 2}")
            await (run.kill_hub, run.kill_host, run.kill_session, kill_node)[number % 4]()
            await run.go_on()
        return {"kills": kills, **await _account(run)}


async def server_kills(seed: int, *, python: str, kills: int = SERVER_KILLS) -> dict[str, Any]:
    """Kill the server of an OpenEnv run repeatedly."""
    with tempfile.TemporaryDirectory(prefix="echo-agents-") as folder:
        init = [str(Path(python).with_name("openenv")), "init", "my_env", "-o", folder]
        await asyncio.to_thread(subprocess.run, init, check=True, capture_output=True)
        port = free_port()
        server = _serve(python, Path(folder) / "my_env", port)
        task = {
            "name": f"openenv:ws://127.0.0.1:{port}/ws",
            "options": {"action": "message", "observation": "echoed_message", "turns": 6, "reward_bounds": [0.0, 10.0]},
        }
        try:
            async with opened("server", python, task, seed) as run:
                await run.go_on()
                for _ in range(kills):
                    server.kill()
                    server.wait()
                    server = _serve(python, Path(folder) / "my_env", port)
                    await run.go_on()
                return {"kills": kills, **await _account(run)}
        finally:
            server.kill()
            server.wait()


def _serve(python: str, directory: Path, port: int) -> subprocess.Popen[bytes]:
    command = [python, "-m", "uvicorn", "server.app:app", "--port", str(port), "--log-level", "error"]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def _account(run: AgentsRun) -> dict[str, Any]:
    """End the hub, and return counts of kills, of turns, and of turns that were lost or repeated."""
    status, said = await run.hub.end()
    if status != 0:
        raise RunFailed(said[-2_000:])
    twice = run.rows(
        """SELECT count(*) FROM (SELECT 1 FROM rollouts WHERE received_at IS NOT NULL AND drop_reason IS NULL
        GROUP BY group_id, "index", turn HAVING count(*) > 1)"""
    )[0][0]
    known = "('leased', 'received', 'scored', 'trained', 'evaluated', 'dropped')"
    uncounted = run.rows(f"SELECT count(*) FROM rollouts WHERE state NOT IN {known}")[0][0]
    lost_sessions = run.rows("SELECT count(*) FROM rollouts WHERE drop_reason = 'session_lost'")[0][0]
    episodes, changed = await _played_again(run)
    return {
        "turns": run.num_scored(),
        "episodes": episodes,
        "lost_or_twice": twice + uncounted + changed,
        "received_twice": twice,
        "episodes_changed": changed,
        "turns_session_lost": lost_sessions,
    }


async def _played_again(run: AgentsRun) -> tuple[int, int]:
    """Play all finished episodes again. Return their number, and the number of episodes that get a different answer or
    reward.
    """
    config = load_config(run.run / "config.toml", {})
    base_dir = resolve_base(config.model.base)
    codec = PromptCodec.of_run(config, base_dir)
    problems = Problems.of_run(config, codec, base_dir=base_dir, run_dir=run.run)
    query = """SELECT group_id, "index", turn, lease_id, reward FROM rollouts
        WHERE state IN ('scored', 'trained') AND drop_reason IS NULL ORDER BY group_id, "index", turn"""
    store = Store.open(RunDirectory(run.run).database_url, beside_hub=True)
    changed = episodes = 0
    try:
        async with SessionHost.open(problems.session_tasks, config.sessions) as host:
            for (group_id, index), rows in groupby(run.rows(query), key=lambda row: (row[0], row[1])):
                turns = list(rows)
                tokens = store.read(read_tokens, [(row[3], index) for row in turns])
                if turns[-1][4] is None or len(tokens) < len(turns):
                    continue  # The episode has not ended, or its tokens are no longer kept.
                episodes += 1
                payloads = [tokens[row[3], index] for row in turns]
                changed += not await _is_same(host, problems, group_id, index, payloads, float(turns[-1][4]))
    finally:
        store.close()
        await asyncio.to_thread(problems.close)
    return episodes, changed


async def _is_same(
    host: SessionHost, problems: Problems, group_id: int, index: int, payloads: list[Any], reward: float
) -> bool:
    """Return True if a new session gives the stored answer to each turn of an episode, and the stored reward."""
    task, problem, seed = await asyncio.to_thread(problems.session_of, group_id)
    key, played = SessionKey(group_id, index), list[PlayedTurn]()
    try:
        for place, payload in enumerate(payloads):
            turn = PlayedTurn(completion_ids=payload.completion_ids, finish_reason=payload.finish_reason.value)
            answer = await host.respond(key, task, problem=problem, seed=seed, turns=[*played, turn])
            if place == len(payloads) - 1:
                ending = answer.ending if isinstance(answer, EpisodeEnd) else None
                return ending is not None and abs(ending.reward - reward) < 1e-9
            if not isinstance(answer, NextTurn) or list(answer.observation_ids) != list(payload.observation_ids):
                return False
            played.append(
                PlayedTurn(
                    completion_ids=payload.completion_ids,
                    finish_reason=payload.finish_reason.value,
                    observation_ids=payload.observation_ids,
                )
            )
    finally:
        host.close(key)
    return False
