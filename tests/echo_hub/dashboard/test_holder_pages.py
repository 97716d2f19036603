from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from echo_hub.dashboard.access.guard import Guard, Visits
from echo_hub.store.store import Store
from tests.echo_hub.dashboard.public_parts import fill, make_team, open_store, served


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def addressed_guard(guard: Guard) -> Guard:
    visits = Visits(place=lambda _: "x", is_https=lambda _: True, address=lambda _: "https://hub.example.org")
    return Guard(guard.credentials, visits, name="test")


async def text_of(session: Any, path: str, status: int = 200) -> str:
    async with session.get(path) as answer:
        assert answer.status == status
        return str(await answer.text())


async def test_a_nodes_page_shows_its_history_and_the_use_of_its_work(
    source: Any, store: Store, addressed_guard: Guard
) -> None:
    one, two, _ = fill(store, ("ada", "bob", "eve"), now=time.time())
    make_team(store, "The Herons", one, two, now=time.time())
    async with served(source, store, addressed_guard) as stranger:
        text = await text_of(stranger, f"/nodes/{two[:10]}")
        assert two not in text, "only the operator sees the whole id"
        for said in (
            "<title>bob is #2 · echo · Echo</title>",
            'og:image" content="https://hub.example.org/nodes/0000000000/picture.png"',
            'name="twitter:card" content="summary_large_image"',
            'href="/teams/The%20Herons"',
            "33.3\u202f%",
            "1 rollout <time",
            'class="share"',
            "<polyline",
        ):
            assert said.replace("0000000000", two[:10]) in text, said
        async with stranger.get(f"/api/v1/leaderboard/nodes/{two}") as answer:
            said = await answer.json()
        assert said["standing"]["trained_rollouts"] == 2 and said["standing"]["streak_days"] == 1
        assert [day["rollouts"] for day in said["days"]] == [2]
        points = said["curve"]["points"]
        assert len(points) == source.step and [p["step"] for p in points if p["rollouts"]] == [2]
        assert points[1]["share"] == 1.0 and points[1]["mean_reward"] is not None


async def test_a_team_has_its_nodes(source: Any, store: Store, guard: Guard) -> None:
    ids = fill(store, ("ada", "bob"), now=time.time())
    make_team(store, "A/B & 50% <i>", *ids, now=time.time())
    async with served(source, store, guard) as stranger:
        path = f"/teams/{quote('A/B & 50% <i>', safe='')}"
        text = await text_of(stranger, path)
        assert "<i>" not in text and "A/B &amp; 50% &lt;i&gt;" in text
        assert text.count("2 rollouts of its own") == 2
        assert f'href="{path}"' in await text_of(stranger, "/teams")
        assert "There is no team" in await text_of(stranger, "/teams/none", 404)
        picture = await stranger.get(f"{path}/picture.png")
        assert picture.status == 200


async def test_an_unknown_nodes_page_says_that_nothing_has_counted(source: Any, store: Store, guard: Guard) -> None:
    async with served(source, store, guard) as stranger:
        for node in ("0123456789", "%3Cscript%3E", "%25", "x" * 300):
            text = await text_of(stranger, f"/nodes/{node}", 404)
            assert "No work of this node" in text and "script>alert" not in text
        assert (await stranger.get("/nodes/0123456789/picture.png")).status == 404
        assert (await stranger.get("/api/v1/leaderboard/nodes/0123456789")).status == 404


async def test_a_hostile_name_stays_text(
    source: Any, store: Store, guard: Guard, hostile_names: tuple[str, ...]
) -> None:
    ids = fill(store, hostile_names, now=time.time())
    async with served(source, store, guard) as stranger:
        paths = ["/leaderboard", *(f"/nodes/{node_id}" for node_id in ids)]
        make_team(store, "<script>alert(2)</script>", ids[0], now=time.time())
        paths += ["/teams", f"/teams/{quote('<script>alert(2)</script>', safe='')}"]
        for path in paths:
            text = await text_of(stranger, path)
            assert not re.search(r"<(script|img)(?! defer)", text), path
            assert "alert(1)>" not in text and "{{" not in text.replace("{{ 7 * 7 }}", ""), path
            assert "\u202e" not in text and "\u200b" not in text and "\u0007" not in text, path
            for value in re.findall(r'content="([^"]*)"', text):
                assert "<" not in value


async def test_pictures_are_drawn_once_and_have_their_size(source: Any, store: Store, guard: Guard) -> None:
    from PIL import Image

    (one,) = fill(store, ("ada",), now=time.time())
    async with served(source, store, guard) as stranger:
        async with stranger.get(f"/nodes/{one[:10]}/picture.png") as answer:
            assert answer.status == 200 and answer.content_type == "image/png"
            body, tag = await answer.read(), answer.headers["ETag"]
            assert "max-age" in answer.headers["Cache-Control"]
        assert Image.open(io.BytesIO(body)).size == (1_200, 630)
        async with stranger.get(f"/nodes/{one}/picture.png", headers={"If-None-Match": tag}) as answer:
            assert answer.status == 304
