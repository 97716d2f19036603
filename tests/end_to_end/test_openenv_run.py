"""Runs with real OpenEnv servers: one with a single slot, and one that is killed again and again."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo_hub.config.toml_text import as_toml
from tests.end_to_end.test_sessions_killed import check_transcripts
from tests.openenv_servers import OpenEnvServer, initialised

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL: dict[str, dict[str, object]] = {
    "sampling": {"max_tokens": 4},
    "evaluation": {"problems": 2, "every": 0},
}
DROPS = """SELECT drop_reason, count(*) FROM rollouts
    WHERE state = 'dropped' AND drop_reason NOT IN ('run_ended', 'stale') GROUP BY drop_reason"""
UNANSWERED = """SELECT lease_id, "index" FROM rollouts
    WHERE received_at IS NOT NULL AND scored_at IS NULL AND state != 'dropped'"""
"""SQL query for the turns that the environment has not answered yet."""


async def run_of(site: Any, server: OpenEnvServer, options: dict[str, Any], **training: int) -> Path:
    """Make a run whose task is the server's environment."""
    run: Path = await site.make_run("run", **SMALL, task={"name": server.task}, training=training)
    config = run / "config.toml"
    text, count = re.subn(r"(?m)^options = .*$", f"options = {as_toml(options)}", config.read_text())
    assert count == 1
    config.write_text(text)
    return run


def check_books(view: dict[str, Any]) -> None:
    """Check that every leased rollout is counted once."""
    counted = view["accounting"]
    ended = counted["trained"] + counted["evaluated"] + sum(counted["dropped"].values())
    assert counted["leased"] == ended + counted["in_flight"] > 0


async def test_a_server_with_one_slot_trains_groups_of_eight(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    with OpenEnvServer("server.app:app", initialised(site.root)) as server:
        options = {"action": "message", "observation": "echoed_message", "turns": 6, "reward_bounds": [0, 10]}
        run = await run_of(site, server, options, steps=4, groups_per_step=1, group_size=8)
        hub, url = await site.hub(run)
        await site.node(url, "volunteer", backend="torch")
        await until(url, lambda view: view["sessions"] and view["sessions"]["waiting"])
        short = "Session slots are short: 1 of 1 are in use"
        await until(url, lambda view: short in " ".join(view["problems"]))
        seen = []

        def is_over(view: dict[str, Any]) -> bool:
            seen.append(view["sessions"])
            return bool(view["state"] == "finished")

        view = await until(url, is_over)
        status, said = await hub.end()
        assert status == 0, said
    check_books(view)
    assert max(figures["open"] for figures in seen) == 1
    # The server has reported its number of slots to the hub.
    assert (seen[-1]["slots"], seen[-1]["most"]) == (1, 64)
    assert books(run).execute(DROPS).fetchall() == []


async def test_a_server_that_is_killed_five_times_loses_no_episode(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    with OpenEnvServer("guessing:words") as server:
        options = {
            "action": "text",
            "observation": "text",
            "turns": 8,
            "reward_bounds": [0, 4],
            "reset": {"pause_s": 0.2},
        }
        run = await run_of(site, server, options, steps=12, groups_per_step=2, group_size=4)
        await asyncio.to_thread(server.kill)
        hub, url = await site.hub(run)  # The server is not running yet.
        away = await until(url, lambda view: view["sessions"]["away"] != "")
        assert "cannot be reached" in " ".join(away["problems"])
        await site.node(url, "volunteer", backend="torch")
        await asyncio.to_thread(server.start)
        written, waiting = books(run), set()
        for step in range(5):

            def is_time(view: dict[str, Any], step: int = step, waiting: set[Any] = waiting) -> bool:
                is_busy = view["trained_step"] >= step and view["sessions"]["open"] > 0
                return is_busy and not waiting & set(written.execute(UNANSWERED))

            await until(url, is_time)  # Kill a turn once only: a session that fails three times in one turn is lost.
            await asyncio.to_thread(server.kill)
            away = await until(url, lambda view: view["sessions"]["away"] != "")
            waiting = set(written.execute(UNANSWERED))
            assert "cannot be reached" in " ".join(away["problems"])
            await asyncio.to_thread(server.start)
            back = await until(url, lambda view: view["sessions"]["away"] == "")
            assert "cannot be reached" not in " ".join(back["problems"])
        view = await until(url, lambda view: view["state"] == "finished", within_s=600)
        check_books(view)
        status, said = await hub.end()
        assert status == 0, said
        assert written.execute(DROPS).fetchall() == []
        await check_transcripts(run, written)
