"""Episodes of several turns on the page of one group: over a real store, with a chat template, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from echo_hub.config.sections import HubConfig
from echo_hub.lifecycle.rollouts import HubRollouts, RolloutReader
from echo_hub.scoring.problems import Problems
from echo_hub.store.store import Store
from echo_shared.records.rollout import SessionEvent
from tests.echo_hub.written_episodes import codec_of_chat, write_episodes, write_loss


class Sessions:
    """History of the sessions of group 0: the session of the first episode died before the second turn."""

    def history(self, group_id: int) -> tuple[SessionEvent, ...]:
        assert group_id == 0
        why = "The process was killed by <b>signal 9</b>."
        return (
            SessionEvent(at=2.0, index=0, attempt=0, kind="opened"),
            SessionEvent(at=3.0, index=0, attempt=0, kind="rebuilt", detail=why),
            SessionEvent(at=4.0, index=0, attempt=0, kind="closed"),
        )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    yield opened
    opened.close()


@pytest.fixture
def serve(open_hub: Any, make_source: Any, store: Store) -> Any:
    async def served(turns: int, **settings: Any) -> ClientSession:
        codec, config = codec_of_chat(), HubConfig()
        write_episodes(store, codec, turns=turns)
        reader = RolloutReader(config, store=store, codec=codec, problems=Problems.of_run(config, codec))
        hub: ClientSession = await open_hub(make_source(step=3), rollouts=HubRollouts(reader, Sessions()), **settings)
        return hub

    return served


@pytest.fixture
def page_of(browser: Any, serve: Any, guard: Any) -> Any:
    async def opened(turns: int, *, width: int = 1280) -> Any:
        hub = await serve(turns, token="")
        async with hub.get("/healthz") as response:
            origin = str(response.url.origin())
        page = await browser.new_page(viewport={"width": width, "height": 900})
        await page.goto(f"{origin}/login")
        await page.locator("#secret").fill(guard.credentials.token)
        await page.get_by_role("button", name="Log in").click()
        await page.goto(f"{origin}/rollouts")
        return page

    return opened


async def test_an_episode_is_shown_turn_by_turn(page_of: Any) -> None:
    from playwright.async_api import expect

    page = await page_of(10)
    await page.get_by_role("link", name="Rollout 1-0 of group 0").click()
    episode = page.locator("#e-0")
    await expect(episode.get_by_role("heading", level=2)).to_have_text("Episode 1: trained 10 turns")
    await expect(episode.locator(".turn")).to_have_count(10)
    first, second, third = (episode.locator(".turn").nth(number) for number in range(3))
    await expect(first.locator(".call")).to_have_text('Call of calculate{"expression": "12 * 34"}')
    await expect(first.locator(".seen")).to_have_text("Tool's result 408 at turn 1")
    await expect(first.locator(".earned")).to_have_text("-0.25")
    await expect(second.locator(".call")).to_have_count(0)
    await expect(second.locator(".seen b")).to_have_text("Environment")
    await expect(second.locator(".seen pre")).to_have_text("The board after turn 2:\n#####\n#@$.#\n#####")
    assert "im_start" not in await second.locator(".seen").inner_text(), "the template's tokens are not the message"
    await expect(second.locator("summary")).to_contain_text("leased 2 times")
    await expect(third.locator(".call.bad")).to_contain_text("not JSON")
    last = episode.locator(".turn").nth(9)
    await expect(last.locator(".earned")).to_have_text("+1.25")
    await expect(last.locator(".seen")).to_have_count(0)
    await page.get_by_role("navigation", name="Turns of episode 1").get_by_role("link", name="10", exact=True).click()
    await expect(last).to_be_in_viewport()
    await expect(page.locator("#e-1 .turn")).to_have_count(1)
    events = episode.get_by_role("list", name="History of the session").get_by_role("listitem")
    await expect(events).to_have_count(3)
    await expect(events.nth(1)).to_contain_text("Session rebuilt The process was killed by <b>signal 9</b>.")
    await expect(page.locator("#e-1 .history")).to_have_count(0)


async def test_a_long_group_shows_one_episode_at_a_time_on_a_phone_too(page_of: Any) -> None:
    from playwright.async_api import expect

    page = await page_of(64 + 16, width=390)
    await page.goto(f"{page.url}/0")
    await expect(page.locator(".turn")).to_have_count(80)
    await expect(page.locator("article")).to_have_count(1)
    await expect(page.locator(".note").filter(has_text="only the turns of episode 1")).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    await page.get_by_role("region", name="Episodes").get_by_role("link", name="2", exact=True).click()
    await expect(page.locator("article")).to_have_id("e-1")
    await expect(page.locator(".turn")).to_have_count(1)
    await page.get_by_role("link", name="policy version").click()
    await expect(page.locator("article")).to_have_id("e-1")


async def test_losses_of_sessions_are_shown_from_the_database(serve: Any, store: Store) -> None:
    hub = await serve(3)
    write_loss(store)
    async with hub.get("/rollouts/0") as response:
        text = " ".join(re.sub(r"<[^>]*>", " ", (await response.text()).partition('id="e-1"')[2]).split())
    assert "Attempt 2" in text and "Sessions lost 1" in text and "Answers replaced 0" in text
    assert "Session lost: turn 2 was dropped killed by signal 9" in text
    assert "1 turn dropped because the session was lost" in text and "90-1" in text


async def test_the_json_tells_calls_messages_and_rewards(serve: Any) -> None:
    hub = await serve(3)
    async with hub.get("/api/v1/rollouts/0") as response:
        group = await response.json()
    turns = [each for each in group["rollouts"] if each["index"] == 0 and each["state"] == "trained"]
    assert [turn["turn_reward"] for turn in turns] == [-0.25, 0.25, None] and turns[2]["reward"] == 1.0
    call = {"name": "calculate", "arguments": '{"expression": "12 * 34"}', "problem": ""}
    assert turns[0]["drawn"]["calls"] == [call]
    assert turns[0]["drawn"]["messages"] == [{"role": "tool", "text": "408 at turn 1"}]
    assert group["episode"] is None and group["losses"] == []
    assert [event["kind"] for event in group["sessions"]] == ["opened", "rebuilt", "closed"]
