from __future__ import annotations

import re
from typing import Any

from aiohttp import ClientSession


async def page(hub: ClientSession, path: str = "/leaderboard") -> str:
    async with hub.get(path) as response:
        assert response.status == 200
        return await response.text()


async def test_the_board_shows_every_node_and_how_it_is_counted(hub: ClientSession) -> None:
    text = await page(hub)
    for word in ("cobalt-heron", "12,629", "attic-pc", "6,315", "The hub counts from its own receipts"):
        assert word in text
    assert "echo-node join http://192.168.1.20:8710" in text


async def test_an_empty_board_invites(open_hub: Any, make_source: Any) -> None:
    text = await page(await open_hub(make_source(names=())))
    assert "takes first place" in text
    assert "echo-node join" in text


async def test_the_install_command_says_whose_program_it_is(open_hub: Any, make_source: Any) -> None:
    source = make_source()
    assert "curl" not in await page(await open_hub(source))
    source.install_command = "curl -fsSL http://hub/install.sh | sh -s -- --join http://hub"
    text = await page(await open_hub(source))
    assert "curl -fsSL http://hub/install.sh | sh -s -- --join http://hub" in text
    assert "a program built by this hub's operator" in text
    assert "runs no code from the hub" in text and "PowerShell" not in text
    source.windows_install_command = "& ([scriptblock]::Create((irm http://hub/install.ps1))) -Join http://hub"
    text = await page(await open_hub(source))
    assert "(irm http://hub/install.ps1))) -Join http://hub" in text and "in PowerShell" in text


async def test_a_finished_run_thanks(open_hub: Any, make_source: Any) -> None:
    text = await page(await open_hub(make_source(step=60)))
    assert "Thank you" in text
    assert "echo-node join" not in text


async def test_an_older_address_of_a_node_leads_to_its_page(hub: ClientSession, source: Any) -> None:
    row, node = (await source.standings())[1], (await source.nodes())[1]
    async with hub.get(f"/leaderboard?node={node.totals.node_id}", allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (303, f"/nodes/{row.node}")
    text = await page(hub, f"/leaderboard?node={row.node}")
    assert node.totals.node_id not in text
    assert "<title>attic-pc is #2 · echo · Echo</title>" in text


async def test_an_unknown_node_is_no_error_and_is_not_repeated(hub: ClientSession) -> None:
    assert "nobody" not in await page(hub, "/leaderboard?node=<nobody>")


async def test_the_board_comes_in_pages_and_is_searched(open_hub: Any, make_source: Any) -> None:
    hub = await open_hub(make_source(names=tuple(f"node-{i:03d}" for i in range(250)), step=5))
    first = await page(hub)
    assert first.count('class="name"') == 100 and "1 to 100 of 250." in first
    assert "?sort=rank&amp;after=100#table" in first and 'rel="prev"' not in first
    last = await page(hub, "/leaderboard?after=200")
    assert last.count('class="name"') == 50 and 'rel="next"' not in last and 'rel="prev"' in last
    found = await page(hub, "/leaderboard?q=NODE-24&sort=-name")
    assert found.count('class="name"') == 10 and 'value="NODE-24"' in found
    assert "?q=NODE-24&amp;sort=tokens#table" in found
    assert "No result for this name" in await page(hub, "/leaderboard?q=%3Cscript%3E")
    assert "<script>" not in await page(hub, "/leaderboard?q=<script>")


async def test_without_teams_the_board_of_teams_says_how_to_make_one(hub: ClientSession) -> None:
    assert "echo-node team create NAME" in await page(hub, "/teams")


async def test_the_board_has_the_tags_for_link_previews(hub: ClientSession) -> None:
    text = await page(hub)
    assert '<meta property="og:title" content="Who teaches echo">' in text


async def test_the_board_sorts_by_address(open_hub: Any, make_source: Any) -> None:
    hub = await open_hub(make_source(names=("b", "c", "a"), step=5))

    async def order(path: str) -> list[str]:
        return re.findall(r"<bdi>(\w)</bdi></a>", await page(hub, path))

    assert await order("/leaderboard") == ["b", "c", "a"]
    assert await order("/leaderboard?sort=name") == ["a", "b", "c"]
    assert await order("/leaderboard?sort=-rollouts") == ["a", "c", "b"]


async def test_a_run_for_tenants_alone_claims_no_training(open_hub: Any, make_source: Any) -> None:
    source, empty = make_source(), make_source(names=())
    assert "taught this model" in await page(await open_hub(source))
    source.trains = empty.trains = False
    text = await page(await open_hub(source))
    assert "sampled for tenants' programs." in text and "taught this model" not in text and "Who teaches" not in text
    text = await page(await open_hub(empty))
    assert "No machine has sampled for a tenant's program yet" in text and "whose rollouts are trained on" not in text
