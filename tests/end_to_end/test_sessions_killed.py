"""A hub with two TextArena games is killed twice: between a session's answer and its commit, and between this commit
and the next lease. No turn is lost, and none happens twice.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_hub.config.file import load_config
from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.sessions.host import SessionHost
from echo_hub.sessions.turns import EpisodeEnd, NextTurn, PlayedTurn, SessionKey
from tests.agents import agents_python

pytestmark = pytest.mark.timeout(900)

KILLS = [("after_step", 3), ("after_commit", 2)] * 5
GAMES = {"minesweeper": "textarena:Minesweeper-v0", "sokoban": "textarena:Sokoban-v0"}
PROGRAM = Path(__file__).with_name("killed_hub.py")


def base_with_room(directory: Path) -> Path:
    """Write the small base model with a context of 4,096 tokens instead of 1,024. Two turns of Minesweeper take about
    1,500 tokens.
    """
    shutil.copytree(resolve_base("builtin:small"), directory)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"max_position_embeddings": 4_096}), "utf-8")
    return directory


@pytest.mark.slow
async def test_a_hub_that_is_killed_ten_times_plays_every_turn_once(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection], tmp_path: Path
) -> None:
    run = await site.make_run(
        "run",
        model={"base": str(base_with_room(tmp_path / "base"))},
        task={"mixture": {key: {"name": name} for key, name in GAMES.items()}},
        sampling={"max_tokens": 8},
        sessions={"python": str(agents_python())},
        training={"steps": 4, "groups_per_step": 4, "group_size": 4},
        evaluation={"problems": 2, "every": 0},
    )
    # A hub evaluates the base model before any node comes, and those turns count, too. A node that has never connected
    # gives up if it finds no hub. So a hub that is not killed takes it in.
    hub, url = await site.hub(run)
    node = await site.node(url, "volunteer", backend="torch")
    await node.printed("Connected to")
    await hub.end()
    port = url.rpartition(":")[2]
    for moment, number in KILLS:
        hub = await site.program(sys.executable, "-u", PROGRAM, moment, str(number), "serve", run, "--port", port)
        status, said = await hub.ended(within_s=300)
        assert status == -9, said
    hub, url = await site.hub(run, "--port", port)
    view = await until(url, lambda view: view["state"] == "finished", within_s=600)
    accounting = view["accounting"]
    assert accounting["leased"] == accounting["trained"] + accounting["evaluated"] + sum(accounting["dropped"].values())
    status, said = await hub.end()
    assert status == 0, said
    database = books(run)
    twice = database.execute(
        """SELECT group_id, "index", turn, count(*) FROM rollouts
           WHERE received_at IS NOT NULL AND (drop_reason IS NULL OR drop_reason NOT IN ('stale', 'run_ended'))
           GROUP BY group_id, "index", turn HAVING count(*) > 1"""
    ).fetchall()
    assert twice == [], "a turn that was received is not drawn again"
    lost = "SELECT count(*) FROM rollouts WHERE drop_reason = 'session_lost'"
    assert database.execute(lost).fetchone() == (0,), "the game plays the same again"
    await check_transcripts(run, database)


async def check_transcripts(run: Path, database: sqlite3.Connection) -> None:
    """Check each trained episode against a new game, in which each of the episode's turns is played exactly once: the
    new game must give the same answers.
    """
    config = load_config(run / "config.toml", {})
    base = resolve_base(config.model.base)
    problems = Problems.of_run(config, PromptCodec.of_run(config, base), base_dir=base, run_dir=run)
    episodes: dict[tuple[int, int], list[Any]] = {}
    rows = database.execute(
        """SELECT group_id, "index", turn, completion_ids, observation_ids, finish_reason, reward
           FROM rollouts JOIN payloads USING (lease_id, "index")
           WHERE state = 'trained' ORDER BY group_id, "index", turn"""
    )
    for row in rows:
        assert row[0] < FIRST_EVALUATION_ID
        episodes.setdefault((row[0], row[1]), []).append(row)
    assert {problems.session_of(group_id)[0] for group_id, _ in episodes} == set(config.task.members)
    assert max(map(len, episodes.values())) > 1
    async with SessionHost.open(problems.session_tasks, config.sessions) as host:
        for (group_id, index), turns in episodes.items():
            assert [row[2] for row in turns] == list(range(len(turns)))
            played: list[PlayedTurn] = []
            for _, _, _, drawn, observed, finish_reason, reward in turns:
                turn = PlayedTurn(completion_ids=np.frombuffer(drawn, "<i4"), finish_reason=finish_reason)
                task, problem, seed = problems.session_of(group_id)
                key = SessionKey(group_id, index, 99)
                answer = await host.respond(key, task, problem=problem, seed=seed, turns=[*played, turn])
                if observed is None:
                    assert isinstance(answer, EpisodeEnd) and answer.ending is not None
                    assert problems.weighing(group_id).total(answer.ending.reward) == reward
                    host.close(key)
                    continue
                assert isinstance(answer, NextTurn)
                assert answer.observation_ids.tobytes() == observed
                played.append(
                    PlayedTurn(
                        completion_ids=turn.completion_ids,
                        finish_reason=finish_reason,
                        observation_ids=answer.observation_ids,
                    )
                )
    problems.close()
