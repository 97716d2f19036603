from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from echo_hub.dashboard.books_away import AGAIN_S, books_away
from echo_shared.errors import DATABASE_AWAY, StorageError

AWAY = StorageError("The hub's database cannot be read.", got="connection refused", code=DATABASE_AWAY)
DAMAGED = StorageError("The hub's database cannot be read.", got="malformed")


async def asked(error: Exception | None, accept: str) -> Any:
    async def handle(_: web.Request) -> web.Response:
        if error is not None:
            raise error
        return web.Response(text="read")

    application = web.Application(middlewares=[books_away])
    application.router.add_get("/", handle)
    async with TestClient(TestServer(application)) as client, client.get("/", headers={"Accept": accept}) as answer:
        return answer.status, answer.headers.get("Retry-After"), answer.content_type, await answer.text()


@pytest.mark.parametrize(
    ("accept", "content_type"), [("text/html,*/*", "text/html"), ("*/*", "application/json"), ("", "application/json")]
)
async def test_without_the_database_requests_are_told_to_retry(accept: str, content_type: str) -> None:
    status, again, kind, said = await asked(AWAY, accept)
    assert (status, again, kind) == (503, str(AGAIN_S), content_type)
    assert "The database server cannot be reached" in said and "connection refused" not in said, (
        "no stranger hears more"
    )


async def test_other_answers_are_unchanged() -> None:
    assert (await asked(None, "*/*"))[::3] == (200, "read")
    assert (await asked(DAMAGED, "*/*"))[0] == 500
