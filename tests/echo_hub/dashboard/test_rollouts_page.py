"""Pages of rollouts, over a real store and a real tokenizer; one test uses a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from echo_hub.config.sections import HubConfig
from echo_hub.dashboard.headers import SECURITY_HEADERS
from echo_hub.dashboard.rollouts_page import WrongQueryError, asked, filter_of, place_of
from echo_hub.lifecycle.rollouts import HubRollouts, RolloutReader
from echo_hub.scoring.problems import Problems
from echo_hub.store.retired import StepSpan
from echo_hub.store.retiring import read_final_keys, read_first_mark, read_ripe, retire
from echo_hub.store.store import Store
from echo_shared.records.rollout import RolloutFilter
from tests.echo_hub.dashboard.test_pages import Tags
from tests.echo_hub.written_rollouts import NODE, TEXTS, codec_of_bytes, write_rollouts

HOSTILE = (
    '<script>alert("owned")</script>',
    "</pre><img src=x onerror=alert(1)>{{ 7 * 7 }}",
    "abc\u202egnp.exe\u202c\u200b",
    "\x1b[2J\x07\x00 bell\r\n\tnext line",
    "שלום עולם",
    "日本語 🌊",
)
PATHS = ("/rollouts", "/rollouts/0", "/rollouts/1?colour=version", "/rollouts/2?colour=none")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    yield opened
    opened.close()


@pytest.fixture
def serve(open_hub: Any, make_source: Any, store: Store) -> Any:
    async def served(texts: tuple[str, ...] = TEXTS, **settings: Any) -> ClientSession:
        codec, config = codec_of_bytes(), HubConfig()
        write_rollouts(store, codec, texts)
        problems = Problems.of_run(config, codec)
        reader = RolloutReader(config, store=store, codec=codec, problems=problems)
        hub: ClientSession = await open_hub(make_source(step=3), rollouts=HubRollouts(reader), **settings)
        return hub

    return served


async def text_of(hub: ClientSession, path: str, *, status: int = 200) -> str:
    async with hub.get(path) as response:
        assert response.status == status
        assert SECURITY_HEADERS.items() <= response.headers.items()
        return await response.text()


async def test_the_list_shows_completions_and_links_to_each(serve: Any) -> None:
    hub = await serve()
    text = await text_of(hub, "/rollouts")
    assert text.count('<th scope="row">') == 6
    assert 'href="/rollouts/2?episode=1#r-3-1"' in text and "no advantage" in text and "all wrong" in text
    assert 'id="r-3-1"' in await text_of(hub, "/rollouts/2")


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        (f"node={NODE}&state=trained", ["2-1", "2-0"]),
        ("step=1&reward_min=0.25", ["2-1", "2-0", "1-0"]),
        ("text=ALL+wrong", ["3-1", "3-0"]),
        ("drop=no_advantage&before=3-1", ["3-0"]),
        ("group=&text=&drop=&tokens_max=", ["3-1", "3-0", "2-1", "2-0", "1-1", "1-0"]),
        ("check=failed", []),
    ],
)
async def test_page_and_json_show_the_requested_rollouts(serve: Any, query: str, ids: list[str]) -> None:
    hub = await serve()
    assert re.findall(r'#r-(\d+-\d+)"', await text_of(hub, f"/rollouts?{query}")) == ids
    async with hub.get(f"/api/v1/rollouts?{query}") as response:
        assert [row["rollout_id"] for row in (await response.json())["rollouts"]] == ids


async def test_a_list_continues_with_the_same_question(serve: Any) -> None:
    hub = await serve()
    async with hub.get("/api/v1/rollouts?limit=4&state=trained") as response:
        first = await response.json()
    async with hub.get(f"/api/v1/rollouts?limit=4&step=1&before={first['rollouts'][1]['rollout_id']}") as response:
        rest = await response.json()
    assert [row["rollout_id"] for row in rest["rollouts"]] == ["1-1", "1-0"] and rest["before"] == ""


@pytest.mark.parametrize(
    "query",
    ["step=x", "step=-1", "reward_min=nan", "state=none", "drop=<b>", "before=1", f"text={'x' * 201}", "node=%00"],
)
async def test_an_invalid_query_is_refused_and_not_run(serve: Any, query: str) -> None:
    hub = await serve()
    text = await text_of(hub, f"/rollouts?{query}", status=400)
    assert 'role="alert"' in text and "<b>" not in text.partition("<main")[2]
    async with hub.get(f"/api/v1/rollouts?{query}") as response:
        assert response.status == 400 and query.partition("=")[0] in (await response.json())["error"]


async def test_a_group_shows_its_prompt_and_each_rollouts_outcome(serve: Any) -> None:
    hub = await serve()
    text = await text_of(hub, "/rollouts/0")
    assert text.count('<article class="rollout"') == 2
    assert "staleness 0" in text and 'href="/rollouts?step=1"' in text
    assert text.count('class="token p') > 20 and 'class="token p4" title' not in text
    assert "Sampled by" in text and "with version 1" in text
    versions = await text_of(hub, "/rollouts/0?colour=version")
    assert 'class="token v0" title="version 0"' in versions and 'class="token v1" title="version 1"' in versions
    assert 'class="token p' not in versions
    async with hub.get("/api/v1/rollouts/0") as response:
        group = await response.json()
    assert [each["reward"] for each in group["rollouts"]] == [1.0, 0.0]
    assert group["rollouts"][0]["drawn"]["text"] == f"{TEXTS[0]}<end>"


@pytest.mark.parametrize("path", ["/rollouts/9", "/rollouts/x", "/rollouts/99999999999999999999"])
async def test_an_unknown_group_is_not_found(serve: Any, path: str) -> None:
    hub = await serve()
    for each in (path, f"/api/v1{path}"):
        async with hub.get(each) as response:
            assert response.status == 404


@pytest.mark.parametrize("path", PATHS)
async def test_strangers_cannot_see_rollouts(serve: Any, path: str) -> None:
    hub = await serve(token="")
    for each in (path, f"/api/v1{path}"):
        async with hub.get(each, allow_redirects=False) as response:
            assert response.status == 401
            assert "wrong" not in await response.text()


@pytest.mark.parametrize("path", PATHS)
async def test_hostile_texts_are_shown_as_plain_text(serve: Any, path: str) -> None:
    hub = await serve(HOSTILE)
    text = await text_of(hub, path)
    tags = Tags(text).found
    assert not [tag for tag, _ in tags if tag in ("img", "style")]
    (script,) = (dict(attributes) for tag, attributes in tags if tag == "script")
    assert script["src"].startswith("/static/key.js"), "the hub's own script"
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on") or name == "style"]
    assert not {"\u202e", "\u202c", "\u200b", "\x1b", "\x07", "\x00", "\r"} & set(text)
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))


async def test_texts_are_shown_unchanged_except_invisible_characters(serve: Any) -> None:
    hub = await serve(HOSTILE)
    shown = [unescape(re.sub(r"<[^>]*>", "", await text_of(hub, path))) for path in PATHS[1:]]
    assert HOSTILE[0] in shown[0] and HOSTILE[1] in shown[0]
    assert "abc⟨U+202E⟩gnp.exe⟨U+202C⟩⟨U+200B⟩" in shown[1]
    assert "␛[2J␇␀ bell␍\n\tnext line" in shown[1]
    assert HOSTILE[4] in shown[2] and HOSTILE[5] in shown[2]
    async with hub.get("/api/v1/rollouts/1") as response:
        assert (await response.json())["rollouts"][1]["drawn"]["text"] == f"{HOSTILE[3]}<end>"


def test_a_question_goes_there_and_back() -> None:
    wanted = RolloutFilter(step=3, node="n", reward_min=-0.5, tokens_max=7, drop="stale", text=" a&b ")
    assert filter_of(asked(wanted)) == wanted
    assert asked(RolloutFilter()) == {} and filter_of({}) == RolloutFilter()
    assert place_of({"before": "12-3"}) == "12-3" and place_of({}) == ""
    with pytest.raises(WrongQueryError, match="check must be one of: no, passed, failed"):
        filter_of({"check": "maybe"})


async def test_the_operator_looks_for_a_text_and_reads_its_group_in_a_real_browser(
    browser: Any, serve: Any, guard: Any
) -> None:
    """Use a phone screen and the keyboard alone. Scripts in completions must not run."""
    from playwright.async_api import expect

    hub = await serve(HOSTILE, token="")
    async with hub.get("/healthz") as response:
        origin = str(response.url.origin())
    page = await browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    await page.goto(f"{origin}/login")
    await page.locator("#secret").fill(guard.credentials.token)
    await page.get_by_role("button", name="Log in").click()
    await page.goto(f"{origin}/rollouts")
    await page.get_by_label("In the completion").fill("OWNED")
    await page.keyboard.press("Enter")
    await expect(page.locator("table.rollouts tbody tr")).to_have_count(1)
    await expect(page.locator("td.excerpt")).to_contain_text(HOSTILE[0])
    await page.get_by_role("link", name="Rollout 1-0 of group 0").press("Enter")
    await expect(page.get_by_role("heading", level=1)).to_have_text("Group 0")
    written = page.get_by_role("region", name="Completion 1-0")
    await expect(written).to_contain_text(HOSTILE[0])
    marked = page.locator("article .token.p1, article .token.p2").first
    plain = page.locator("article .token.p0").first
    colour = "element => getComputedStyle(element).backgroundColor"
    assert await marked.evaluate(colour) != await plain.evaluate(colour)
    await page.get_by_role("link", name="policy version").press("Enter")
    await expect(page.locator("article .token.v1").first).to_be_visible()
    width = await page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390
    assert wrong == []


async def test_all_columns_fit_a_laptops_window(browser: Any, serve: Any, guard: Any) -> None:
    """The time is in the last column. It must be visible even next to long completions and long node names."""
    hub = await serve(("many words " * 100, *["W" * 400] * (len(TEXTS) - 1)), token="")
    async with hub.get("/healthz") as response:
        origin = str(response.url.origin())
    page = await browser.new_page()
    await page.goto(f"{origin}/login")
    await page.locator("#secret").fill(guard.credentials.token)
    await page.get_by_role("button", name="Log in").click()
    for width in (1280, 1024):
        await page.set_viewport_size({"width": width, "height": 800})
        await page.goto(f"{origin}/rollouts")
        edge = await page.locator("table.rollouts tbody tr:first-child time").evaluate(
            "element => element.getBoundingClientRect().right"
        )
        assert 0 < edge <= width
        hidden = "element => element.scrollWidth - element.parentElement.clientWidth"
        assert await page.locator("table.rollouts").evaluate(hidden) <= 0


async def test_retired_rollouts_are_reported_as_retired(serve: Any, store: Store) -> None:
    hub = await serve()
    assert "no longer in the database" not in await text_of(hub, "/rollouts")
    (ripe,) = store.read(read_ripe, store.read(read_first_mark), 2)
    span = StepSpan(after=store.read(read_first_mark), through=ripe.mark)
    assert retire(store, store.read(read_final_keys, span), span) == 4
    page = await text_of(hub, "/rollouts")
    assert "4 rollouts, of the steps up to 1, are no longer in the database" in page
    assert "The rollouts of step 1 are no longer in the database" in await text_of(hub, "/rollouts?step=1")
    assert "The rollouts of this group are no longer in the database" in await text_of(hub, "/rollouts/0")
    assert "no longer in the database" not in await text_of(hub, "/rollouts/2")
    async with hub.get("/api/v1/rollouts?step=1") as response:
        listed = await response.json()
    assert (listed["rollouts"], listed["retired_rollouts"], listed["retired_step"]) == ([], 4, 1)
    async with hub.get("/api/v1/rollouts/0") as response:
        group = await response.json()
    assert group["retired"] and group["rollouts"] == [] and group["prompt"]
    await text_of(hub, "/rollouts/77", status=404)
