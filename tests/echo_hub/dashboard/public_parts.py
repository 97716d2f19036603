"""A server of the public pages on a real port, over a store with nodes, teams and steps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.board import AboutView
from echo_hub.dashboard.headers import add_security_headers
from echo_hub.dashboard.pages import routes
from echo_hub.store.store import Store
from echo_hub.store.teams import change_team
from echo_hub.views.board import HubBoard
from echo_shared.wire.messages import TeamWanted
from tests.echo_hub.store.conftest import Records

DAY = 86_400.0


def fill(store: Store, names: tuple[str, ...], *, now: float) -> list[str]:
    """Record one step a day up to `now`, each by a node of the given name, and return the nodes' ids. The first two
    nodes are in a team.
    """
    ids = [f"{number:010x}{0:010x}" for number in range(1, len(names) + 1)]
    for node_id, name in zip(ids, names, strict=True):
        store.node_seen(node_id=node_id, public_key=bytes(32), name=name, backend="torch", device="d", now=now)
    for step, node_id in enumerate(ids, start=1):
        at = now - DAY * (len(ids) - step)
        store.apply(Records.one_step(step, lease_id=step, group_id=step - 1, node_id=node_id), now=at)
    return ids


def make_team(store: Store, name: str, *ids: str, now: float) -> None:
    store.write(change_team, ids[0], TeamWanted(action="create", name=name), now)
    for node_id in ids[1:]:
        store.write(change_team, node_id, TeamWanted(action="join", name=name), now)


@asynccontextmanager
async def served(
    source: Any, store: Store, guard: Guard, *, about: AboutView | None = None
) -> AsyncIterator[ClientSession]:
    application = web.Application(middlewares=[guard.middleware])
    application.on_response_prepare.append(add_security_headers)
    board = HubBoard(store)
    application.add_routes(routes(source, guard, {}, board=board, about=about, min_interval_s=0.0))
    server = TestServer(application)
    await server.start_server(shutdown_timeout=0.1)
    try:
        async with ClientSession(server.make_url("/")) as session:
            yield session
    finally:
        await server.close()


def open_store(directory: Path) -> Store:
    return Store.open(f"sqlite:///{directory / 'echo.db'}")
