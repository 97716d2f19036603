"""An operator tries two versions in a real browser; a real process samples with the built-in model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from echo_hub.dashboard.access.guard import Guard
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.talking.trying import Trials
from tests.echo_hub.lifecycle.gguf.test_export import make_run_with_version
from tests.echo_hub.talking.test_trying import CONFIG


async def test_two_versions_are_tried_beside_each_other(
    browser: Any, open_hub: Any, source: Any, guard: Guard, tmp_path: Path
) -> None:
    from playwright.async_api import expect

    base = resolve_base("builtin:tiny")
    run = make_run_with_version(tmp_path, "builtin:tiny", strength=0.5)
    trials = Trials(CONFIG, run, PromptCodec.load(base), base)
    hub = await open_hub(source, token="", trials=trials)
    async with hub.get("/healthz") as response:
        origin = str(response.url.origin())
    page = await (await browser.new_context(base_url=origin)).new_page()
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    try:
        await page.goto(f"/?token={guard.credentials.token}")
        await page.get_by_role("link", name="Try it").click()
        await page.get_by_label("Prompt", exact=True).fill("12+34=")
        await page.get_by_role("button", name="Sample").click()
        await page.wait_for_url("**/try/1")
        await expect(page.locator("#trial-state")).to_have_attribute("data-state", "done", timeout=120_000)
        for version in ("version 3", "base model"):
            await expect(page.get_by_role("article", name=re.compile(version))).to_have_count(2)
        await expect(page.get_by_label("Prompt", exact=True)).to_have_value("12+34=")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth") and wrong == []
    finally:
        await trials.close()
