from __future__ import annotations

import html.parser
import re
from typing import Any

import pytest
from aiohttp import ClientSession

from echo_hub.dashboard.api import STEPS_PER_ANSWER
from echo_hub.dashboard.curves import MOST_POINTS
from echo_hub.dashboard.headers import SECURITY_HEADERS

PAGES = ("/", "/fleet", "/leaderboard")


class Tags(html.parser.HTMLParser):
    """All tags of a page with their attributes, parsed as in a browser."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.mark.parametrize(
    "path",
    [
        *PAGES,
        *(f"/api/v1/{name}" for name in ("run", "nodes", "steps", "curves", "leaderboard")),
        "/metrics",
        "/healthz",
        "/readyz",
    ],
)
async def test_every_route_answers_with_the_security_headers(hub: ClientSession, path: str) -> None:
    async with hub.get(path) as response:
        assert response.status == 200
        assert SECURITY_HEADERS.items() <= response.headers.items()
        assert response.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("path", PAGES)
async def test_hostile_names_are_shown_as_plain_text(
    open_hub: Any, make_source: Any, hostile_names: tuple[str, ...], path: str
) -> None:
    hub = await open_hub(make_source(names=hostile_names, step=12))
    async with hub.get(path) as response:
        text = await response.text()
    tags = Tags(text).found
    scripts = [
        attributes for tag, attributes in tags if tag == "script" and attributes.get("type") != "application/json"
    ]
    assert scripts and all((attributes.get("src") or "").startswith("/static/") for attributes in scripts)
    assert not [tag for tag, _ in tags if tag == "img"]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on") or name == "style"]
    assert "&lt;script&gt;alert(" in text
    assert "{{ 7 * 7 }}" in text
    assert "\u202e" not in text


@pytest.mark.parametrize("path", PAGES)
async def test_nothing_is_loaded_from_other_hosts(hub: ClientSession, path: str) -> None:
    async with hub.get(path) as response:
        tags = Tags(await response.text()).found
    for _, attributes in tags:
        for name in ("src", "href"):
            assert re.match(r"(/(?!/)|\?|#)", attributes.get(name) or "/")


@pytest.mark.parametrize("path", PAGES)
async def test_ids_are_unique_and_live_parts_have_one(hub: ClientSession, path: str) -> None:
    async with hub.get(path) as response:
        tags = Tags(await response.text()).found
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all("id" in attributes for _, attributes in tags if "data-live" in attributes)


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_keeps_its_live_parts_from_first_to_last(open_hub: Any, make_source: Any, path: str) -> None:
    shapes = []
    for made in (make_source(names=()), make_source(step=1), make_source(step=37), make_source(step=60)):
        hub = await open_hub(made)
        async with hub.get(path) as response:
            tags = Tags(await response.text()).found
        shapes.append({attributes["id"] for _, attributes in tags if "data-live" in attributes})
    assert all(shape == shapes[-1] for shape in shapes)


async def test_the_operator_logs_in_bans_pardons_and_logs_out_in_a_real_browser(
    browser: Any, open_hub: Any, make_source: Any, guard: Any, desk: Any, hostile_names: tuple[str, ...]
) -> None:
    from playwright.async_api import expect

    source = make_source(names=hostile_names, step=37)
    hub = await open_hub(source, token="", desk=desk)

    async def done() -> list[tuple[str, str]]:
        return [(one.action, one.request["node"]) for one in await desk.log(limit=9, before=None)]

    async with hub.get("/healthz") as response:
        origin = str(response.url.origin())
    page = await browser.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    asked: list[str] = []
    answers = [False, True, False, True]

    async def answer(dialog: Any) -> None:
        asked.append(dialog.message)
        await (dialog.accept() if answers.pop(0) else dialog.dismiss())

    page.on("dialog", answer)
    await page.goto(f"{origin}/")
    assert page.url == f"{origin}/login"
    await page.locator("#secret").fill(guard.credentials.token)
    await page.get_by_role("button", name="Log in").click()
    await expect(page).to_have_url(f"{origin}/")
    await expect(page.locator("#chart-reward canvas")).to_be_visible()
    (cookie,) = await page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert await page.evaluate("document.cookie") == ""

    views = [node.totals for node in await source.nodes()]
    nodes = {totals.node_id: totals.name for totals in views}
    node_id = next(key for key, name in nodes.items() if name.startswith("<script>"))
    await page.get_by_role("link", name="Fleet").click()
    button = page.locator(f"#ban-{node_id}")
    await button.click()
    assert await done() == []
    await button.click()
    await expect(page).to_have_url(f"{origin}/fleet/{node_id}")
    assert await done() == [("ban", node_id)]
    question = "The node is disconnected and may not join again. The run gets a new key."
    assert asked == [f'Ban <script>alert("owned")</script>? {question}'] * 2

    await page.goto(f"{origin}/fleet")
    offered = await page.locator("[id^=pardon-]").evaluate_all("(all) => all.map((one) => one.id)")
    quarantined = [totals.node_id for totals in views if totals.standing == "quarantined"]
    assert sorted(offered) == sorted(f"pardon-{node_id}" for node_id in quarantined)
    button = page.locator(f"#pardon-{quarantined[0]}")
    await button.click()
    assert len(await done()) == 1
    await button.click()
    await expect(page).to_have_url(f"{origin}/fleet/{quarantined[0]}")
    assert await done() == [("pardon", quarantined[0]), ("ban", node_id)]
    assert asked[2:] == [asked[2]] * 2
    assert asked[2].startswith(f"Pardon {nodes[quarantined[0]]}? The node starts over")

    await page.get_by_role("button", name="Log out").click()
    await expect(page).to_have_url(f"{origin}/login")
    assert await page.context.cookies() == []
    await page.goto(f"{origin}/leaderboard")
    await expect(page.locator("#link")).to_have_text("live")
    await page.goto(f"{origin}/")
    assert page.url == f"{origin}/login"
    assert wrong == []


async def test_both_pages_live_in_a_real_browser(browser: Any, open_hub: Any, source: Any, guard: Any) -> None:
    from playwright.async_api import expect

    hub = await open_hub(source, token="", min_interval_s=0.1)
    async with hub.get("/healthz") as response:
        origin = str(response.url.origin())
    page = await browser.new_page(viewport={"width": 360, "height": 740})
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))

    await page.goto(f"{origin}/?token={guard.credentials.token}")
    assert page.url == f"{origin}/", "the token is no longer in the address"
    last_step = "() => document.getElementById('chart-reward').plot?.data[0].at(-1)"
    await page.wait_for_function(f"() => ({last_step})() === 37")
    await expect(page.locator("#link")).to_have_text("live")
    await expect(page.locator("#step")).to_have_text("37")
    await page.evaluate("window.notReloaded = true")
    source.advance(3)
    await expect(page.locator("#step")).to_have_text("40")
    await page.wait_for_function(f"() => ({last_step})() === 40")
    await expect(page).to_have_title("40/60 · echo · Echo")
    assert await page.evaluate("window.notReloaded && document.documentElement.scrollWidth <= 360")

    await page.goto(f"{origin}/leaderboard")
    await expect(page.locator("#link")).to_have_text("live")
    await expect(page.locator("#rows tr")).to_have_count(2)
    source.advance()
    await expect(page.locator("#hero")).to_contain_text("step 41 of 60")
    assert wrong == []
    assert all(url.startswith((origin, "data:")) for url in requested)


async def test_a_page_says_that_it_is_stale_and_resumes_with_the_hub(
    browser: Any, open_hub: Any, source: Any, guard: Any, servers: list[Any]
) -> None:
    from playwright.async_api import expect

    await open_hub(source, token="", min_interval_s=0.1)
    origin, port = str(servers[0].make_url("/")), servers[0].port
    page = await browser.new_page()
    await page.goto(f"{origin}?token={guard.credentials.token}")
    await expect(page.locator("#link")).to_have_text("live")
    await page.evaluate("window.notReloaded = true")
    await servers[0].close()
    await expect(page.locator("#link")).to_contain_text("reconnecting; as of")
    await expect(page.locator("#link")).to_have_attribute("data-state", "away")
    source.advance(2)
    await open_hub(source, token="", min_interval_s=0.1, port=port)
    await expect(page.locator("#link")).to_have_text("live", timeout=30_000)
    await expect(page.locator("#step")).to_have_text("39")
    await page.wait_for_function("() => document.getElementById('chart-speed').plot.data[0].at(-1) === 39")
    assert await page.evaluate("window.notReloaded")


async def test_selected_text_is_not_replaced(browser: Any, open_hub: Any, source: Any, servers: list[Any]) -> None:
    from playwright.async_api import expect

    await open_hub(source, token="", min_interval_s=0.1)
    page = await browser.new_page()
    await page.goto(f"{servers[0].make_url('/leaderboard')}")
    await expect(page.locator("#link")).to_have_text("live")
    await page.evaluate("document.getSelection().selectAllChildren(document.querySelector('#hero .kicker'))")
    shown = await page.locator("#rows").inner_text()
    source.advance()
    await expect(page.locator("#rows")).not_to_have_text(shown)
    await expect(page.locator("#hero .kicker")).to_contain_text("step 37 of 60")
    await page.evaluate("document.getSelection().removeAllRanges()")
    await expect(page.locator("#hero .kicker")).to_contain_text("step 38 of 60")


async def test_the_charts_of_a_long_run_reach_its_end_and_stay_light(
    browser: Any, open_hub: Any, source: Any, guard: Any
) -> None:
    source.total = 2 * STEPS_PER_ANSWER + 1_000
    source.step = 2 * STEPS_PER_ANSWER
    hub = await open_hub(source)
    async with hub.get("/healthz") as response:
        origin = str(response.url.origin())
    page = await browser.new_page()
    await page.goto(f"{origin}/?token={guard.credentials.token}")
    drawn = "(document.getElementById('chart-norm').plot?.data[0] ?? [])"
    await page.wait_for_function(f"step => ({drawn}).at(-1) === step", arg=source.step, timeout=20_000)
    numbers = await page.evaluate(drawn)
    assert MOST_POINTS / 2 <= len(numbers) <= MOST_POINTS
    assert numbers == sorted(set(numbers))
    for steps in (1, 900):
        source.advance(steps)
        await page.wait_for_function(f"step => ({drawn}).at(-1) === step", arg=source.step, timeout=20_000)
        numbers = await page.evaluate(drawn)
        assert len(numbers) <= MOST_POINTS
        assert numbers == sorted(set(numbers)), "points were merged or added, but none appears twice"


async def test_every_chart_of_the_learner_has_its_lines(browser: Any, open_hub: Any, source: Any, guard: Any) -> None:
    hub = await open_hub(source)
    async with hub.get("/healthz") as response:
        origin = str(response.url.origin())
    page = await browser.new_page()
    await page.goto(f"{origin}/?token={guard.credentials.token}")
    await page.wait_for_function(
        "() => document.getElementById('chart-tokens').plot?.data[0].length > 1", timeout=20_000
    )
    lines = """[...document.querySelectorAll('.chart')].map(chart => [
        chart.id, chart.plot.data.slice(1).filter(column => column.filter(Number.isFinite).length > 1).length])"""
    assert dict(await page.evaluate(lines)) == {
        "chart-reward": 10,
        "chart-entropy": 1,
        "chart-reward_std": 2,
        "chart-length": 2,
        "chart-staleness": 3,
        "chart-speed": 1,
        "chart-ratio": 2,
        "chart-kl": 2,
        "chart-norm": 1,
        "chart-shares": 3,
        "chart-seconds": 2,
        "chart-tokens": 1,
        "chart-spread": 3,
    }


async def test_all_charts_share_cursor_and_zoom_by_mouse_and_by_keyboard(
    browser: Any, open_hub: Any, source: Any, guard: Any
) -> None:
    from playwright.async_api import expect

    hub = await open_hub(source)
    async with hub.get("/healthz") as response:
        origin = str(response.url.origin())
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    await page.goto(f"{origin}/?token={guard.credentials.token}")
    await page.wait_for_function("() => document.getElementById('chart-tokens').plot?.data[0].length > 1")
    steps = """[...document.querySelectorAll('.chart')].filter(chart => chart.id !== 'chart-spread')
        .map(chart => chart.plot.data[0][chart.plot.cursor.idx])"""
    ranges = """[...new Set([...document.querySelectorAll('.chart')].filter(chart => chart.id !== 'chart-spread')
        .map(chart => `${chart.plot.scales.x.min} ${chart.plot.scales.x.max}`))]"""
    whole = await page.evaluate(ranges)
    assert len(whole) == 1

    await page.locator("#chart-reward").focus()
    await page.keyboard.press("ArrowRight")
    assert set(await page.evaluate(steps)) == {37}
    await page.keyboard.press("ArrowLeft")
    assert set(await page.evaluate(steps)) == {36}
    await expect(page.locator("#chart-speed .u-legend .u-value").first).to_have_text("36")
    await page.keyboard.press("+")
    await page.wait_for_function(f"() => ({ranges}).length === 1 && ({ranges})[0] !== '{whole[0]}'")
    await page.keyboard.press("Escape")
    await page.wait_for_function(f"() => ({ranges})[0] === '{whole[0]}'")

    over = page.locator("#chart-speed .u-over")
    await over.scroll_into_view_if_needed()
    box = await over.bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 20)
    await page.mouse.down()
    await page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 20, steps=4)
    await page.mouse.up()
    await page.wait_for_function(f"() => ({ranges}).length === 1 && ({ranges})[0] !== '{whole[0]}'")
    zoomed = await page.evaluate(ranges)
    source.advance()
    await page.wait_for_function("() => document.getElementById('chart-speed').plot.data[0].at(-1) === 38")
    assert await page.evaluate(ranges) == zoomed, "a new step does not reset the zoom"
    await page.get_by_role("button", name="Show all steps").click()
    await page.wait_for_function(f"() => ({ranges})[0].startsWith('0 ')")
    await expect(page.locator("#zoom")).to_be_hidden()
