from __future__ import annotations

from typing import Any

PHONE = {"width": 390, "height": 844}
MOST_HEIGHT = 3_000
"""Maximum height of the page on a phone when it is first shown, in pixels."""


UNUSED = """() => [...document.querySelectorAll('.chart')].filter((chart) => chart.checkVisibility()).map((chart) =>
    [chart.id, chart.clientHeight - chart.plot.height - chart.querySelector('.u-legend').offsetHeight])
    .filter(([, rest]) => Math.abs(rest) > 6)"""
"""Script that finds each chart that does not fill its container, and returns its id with the difference in pixels."""


async def opened(browser: Any, open_hub: Any, source: Any, guard: Any, **settings: Any) -> tuple[Any, list[str]]:
    hub = await open_hub(source)
    async with hub.get("/healthz") as response:
        origin = str(response.url.origin())
    page = await browser.new_page(**settings)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    await page.goto(f"{origin}/?token={guard.credentials.token}")
    return page, wrong


async def test_on_a_phone_the_page_is_short_and_never_wider_than_it(
    browser: Any, open_hub: Any, make_source: Any, guard: Any, hostile_names: tuple[str, ...]
) -> None:
    stalled = make_source(step=37)
    stalled.waited_s = 900.0
    fresh, hostile = make_source(names=()), make_source(names=hostile_names, step=37)
    for source in (make_source(step=37), fresh, stalled, make_source(step=60), hostile):
        page, wrong = await opened(browser, open_hub, source, guard, viewport=PHONE)
        await page.wait_for_function("() => document.querySelector('#chart-reward').plot")
        size = "() => [document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        width, height = await page.evaluate(size)
        assert width <= PHONE["width"] and height < MOST_HEIGHT
        assert await page.evaluate("() => document.querySelector('#answers').getBoundingClientRect().bottom") < 1_100
        await page.evaluate("() => document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        await page.wait_for_function("() => [...document.querySelectorAll('.chart')].every((chart) => chart.plot)")
        assert (await page.evaluate(size))[0] <= PHONE["width"], "nor with all parts open"
        assert await page.evaluate(UNUSED) == []
        assert wrong == []
        await page.close()


async def test_a_folded_part_opens_by_its_link_and_then_its_charts_are_drawn(
    browser: Any,
    open_hub: Any,
    source: Any,
    guard: Any,
) -> None:
    page, wrong = await opened(browser, open_hub, source, guard, viewport=PHONE)
    await page.wait_for_function("() => document.querySelector('#chart-reward').plot")
    assert await page.evaluate("() => document.querySelector('#chart-speed').plot") is None
    for _ in range(2):  # The second click does not change the address, but must open the part all the same.
        await page.evaluate("() => { document.querySelector('#rollout').open = false; }")
        await page.click(".planes a[href='#rollout']")
        await page.wait_for_function("() => document.querySelector('#rollout').open")
    await page.wait_for_function("() => document.querySelector('#chart-speed').plot?.data[0].length > 30")
    await page.evaluate("() => { document.querySelector('#rollout').open = false; }")
    await page.click("#answer-fed a")
    await page.wait_for_function("() => document.querySelector('#rollout').open")
    source.advance()
    await page.wait_for_function("() => document.getElementById('chart-speed').plot.data[0].at(-1) === 38")
    assert wrong == []


async def test_on_a_desk_all_is_open_and_the_first_screen_has_the_answers(
    browser: Any,
    open_hub: Any,
    source: Any,
    guard: Any,
) -> None:
    page, wrong = await opened(browser, open_hub, source, guard, viewport={"width": 1440, "height": 900})
    await page.wait_for_function("() => [...document.querySelectorAll('.chart')].every((chart) => chart.plot)")
    assert await page.evaluate("() => document.querySelectorAll('details.plane:not([open])').length") == 0
    assert await page.evaluate(UNUSED) == []
    assert await page.evaluate("() => document.querySelector('.planes').getBoundingClientRect().bottom") < 900
    band = """() => { const { plot } = document.getElementById('chart-reward');
        const [low, high] = plot.bands.at(-1).series;
        return plot.data[low].some((value, i) => value > plot.data[high][i]); }"""
    assert await page.evaluate(band), "the band of the spread encloses the trend"
    assert wrong == []
