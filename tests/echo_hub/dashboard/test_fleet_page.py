from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession

from echo_hub.dashboard.fleet import NODES_SHOWN


async def page(hub: ClientSession, path: str = "/fleet", status: int = 200) -> str:
    async with hub.get(path) as response:
        assert response.status == status
        return await response.text()


def names_in(text: str) -> list[str]:
    return re.findall(r'<a class="name"[^>]*><bdi>([^<]+)</bdi>', text)


def with_first(source: Any, **changed: Any) -> None:
    nodes = source.nodes

    async def changed_nodes() -> Any:
        first, *rest = await nodes()
        totals = {name: changed[name] for name in changed if name in type(first.totals).__slots__}
        said = {name: value for name, value in changed.items() if name not in totals}
        return (replace(first, **said, totals=replace(first.totals, **totals)), *rest)

    source.nodes = changed_nodes


async def test_nodes_sort_by_address(open_hub: Any, make_source: Any) -> None:
    hub = await open_hub(make_source(names=("b", "c", "a"), step=5))
    assert names_in(await page(hub, "/fleet?sort=name")) == ["a", "b", "c"]
    assert names_in(await page(hub, "/fleet?sort=-name")) == ["c", "b", "a"]
    assert names_in(await page(hub, "/fleet?sort=nonsense")) == names_in(await page(hub)) == ["b", "c", "a"]
    assert 'aria-sort="ascending"><a href="?sort=-name#table"' in await page(hub, "/fleet?sort=name")
    assert 'aria-sort="descending"><a href="?sort=-speed#table"' in await page(hub), "the fastest first"


async def test_a_row_shows_a_nodes_kind_and_state(hub: ClientSession, source: Any) -> None:
    text = await page(hub)
    first, second = (node.totals.node_id for node in await source.nodes())
    rows = dict(re.findall(r'<tr id="node-(\w+)".*?(<th.*?)</tr>', text, re.DOTALL))
    for said in ("cobalt-heron", first, "llama_cpp", "AMD Ryzen 7 7840U", "q4_k_m", "40 checked", f"/fleet/{first}"):
        assert said in rows[first], said
    for said in ("standing by", ">cheaper nodes suffice</small>", "bf16", "$0.12", "$0.40/h", 'id="ban-'):
        assert said in rows[second], said
    assert 'title="cheaper nodes suffice. They return enough."' in rows[second]
    assert '<a class="activity standing_by" href="/fleet?state=standing_by">1 standing by</a>' in text
    assert '<a href="/fleet?engine=torch&amp;precision=bf16">1 <bdi>torch bf16</bdi></a>' in text
    assert '<a class="standing proven" href="/fleet?standing=proven">1 proven</a>' in text


async def test_a_banned_node_is_shown_as_banned(open_hub: Any, source: Any) -> None:
    with_first(source, connected=False, banned_at=1.0)
    text = await page(await open_hub(source))
    assert '<span class="activity banned">banned</span>' in text
    assert 'href="/fleet?state=banned">1 banned</a>' in text


async def test_only_the_operator_sees_a_nodes_invite(open_hub: Any, source: Any) -> None:
    with_first(source, invite="Ada <b>")
    hub = await open_hub(source)
    assert (await page(hub)).count("by the invite for <bdi>Ada &lt;b&gt;</bdi>") == 1
    assert names_in(await page(hub, "/fleet?q=ada+<b>")) == ["cobalt-heron"]
    for public in ("/leaderboard", "/api/v1/leaderboard"):
        async with hub.get(public) as answer:
            assert answer.status == 200 and "Ada" not in await answer.text()


async def test_a_large_fleet_has_pages(open_hub: Any, make_source: Any) -> None:
    hub = await open_hub(make_source(names=tuple(f"n{i:03}" for i in range(2 * NODES_SHOWN + 5)), step=9))
    first = await page(hub, "/fleet?sort=name")
    assert len(names_in(first)) == NODES_SHOWN and "1 to 100 of 205." in first and 'rel="prev"' not in first
    assert '<a href="?sort=name&amp;after=100#table" rel="next">Next</a>' in first
    last = await page(hub, "/fleet?sort=name&after=200")
    assert names_in(last) == [f"n{i}" for i in range(200, 205)] and "201 to 205 of 205." in last
    assert 'rel="prev">Previous' in last and 'rel="next"' not in last
    beyond = await page(hub, "/fleet?after=4000")
    assert names_in(beyond) == [] and "Nodes are listed here" in beyond
    assert "data-revision" in first and "data-revision" not in last


async def test_filters_are_kept_by_headings_pages_and_the_form(open_hub: Any, make_source: Any) -> None:
    hub = await open_hub(make_source(names=tuple(f"n{i:03}" for i in range(2 * NODES_SHOWN + 5)), step=9))
    text = await page(hub, "/fleet?engine=torch&q=n&sort=-name")
    assert names_in(text)[:3] == ["n203", "n201", "n199"]
    assert '<a href="?q=n&amp;engine=torch&amp;sort=-name&amp;after=100#table" rel="next">' in text
    assert '<a href="?q=n&amp;engine=torch&amp;sort=name#table"' in text
    assert 'value="n"' in text and '<option value="torch" selected>torch</option>' in text
    assert '<a href="/fleet">Show all</a>' in text
    none = await page(hub, "/fleet?engine=<i>")
    assert "No node matches." in none and "<i>" not in none and "&lt;i&gt;" in none


async def test_an_invalid_query_is_refused(hub: ClientSession) -> None:
    text = await page(hub, "/fleet?state=<script>", 400)
    assert "state must be one of" in text and "<script>&#39;" not in text and "&lt;script&gt;" in text


async def test_the_page_reports_an_empty_fleet(open_hub: Any, make_source: Any) -> None:
    text = await page(await open_hub(make_source(names=())))
    assert "Nodes are listed here as soon as they join" in text and "no node yet" in text


async def test_nodes_that_the_pages_do_not_know_are_counted(open_hub: Any, source: Any) -> None:
    run = replace(await source.run_view(), nodes_known=12_000)

    async def run_view() -> Any:
        return run

    source.run_view = run_view
    assert "12,000 nodes have ever joined. The pages list 2 of them" in await page(await open_hub(source))


@pytest.mark.parametrize("path", ["/fleet", "/fleet/abc", "/api/v1/nodes/abc"])
async def test_the_fleet_is_the_operators(open_hub: Any, source: Any, path: str) -> None:
    hub = await open_hub(source, token="")
    async with hub.get(path, allow_redirects=False) as response:
        assert response.status in (303, 401)
        assert "cobalt-heron" not in await response.text()
