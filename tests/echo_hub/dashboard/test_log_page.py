from __future__ import annotations

from typing import Any

import pytest
from aiohttp import ClientSession

from echo_hub.dashboard import log_page
from echo_hub.dashboard.log_page import WrongLogQueryError, event_filter_of
from echo_shared.records.run import EventFilter


async def test_events_show_strangers_input_as_plain_text(
    open_hub: Any, make_source: Any, hostile_names: tuple[str, ...]
) -> None:
    hub = await open_hub(make_source(names=hostile_names, step=30))
    text = await (await hub.get("/log")).text()
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    assert "learner died" in text and 'class="warning"' in text and "restarted from step 20" in text
    assert '<a href="/log" aria-current="page">Log</a>' in text


async def test_a_query_selects_lines_and_pages_continue(
    hub: ClientSession, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.names = tuple("abcdef")
    monkeypatch.setattr(log_page, "ROWS_SHOWN", 3)
    text = await (await hub.get("/log?kind=node_joined")).text()
    assert "f joined" in text and "c joined" not in text and "/log?kind=node_joined&amp;before=4" in text
    text = await (await hub.get("/log?kind=node_joined&before=4")).text()
    assert "c joined" in text and "d joined" not in text and '<a href="/log?kind=node_joined">Newest</a>' in text
    assert "No event matches." in await (await hub.get("/log?subject=nobody")).text()


async def test_the_same_as_json(hub: ClientSession, source: Any) -> None:
    answer = await (await hub.get("/api/v1/log?severity=warning")).json()
    (event,) = answer["events"]
    assert (event["kind"], event["severity"], event["data"], event["warning"]) == (
        "learner_died",
        "warning",
        {"deaths": 1},
        True,
    )
    assert len((await (await hub.get("/api/v1/log?limit=2")).json())["events"]) == 2


@pytest.mark.parametrize("query", ["severity=bad", "before=x", "kind=" + "k" * 65, "subject=a%00b", "limit=0"])
async def test_a_wrong_query_is_refused_with_the_valid_form(hub: ClientSession, query: str) -> None:
    async with hub.get(f"/api/v1/log?{query}") as answer:
        assert answer.status == 400 and "must be" in (await answer.json())["error"]
    async with hub.get(f"/log?{query}") as page:
        assert page.status == (200 if query.startswith("limit") else 400)


async def test_only_the_operator_sees_the_log(open_hub: Any, source: Any) -> None:
    public = await open_hub(source, token="")
    for path in ("/log", "/api/v1/log"):
        async with public.get(path) as answer:
            assert answer.status == 401


def test_the_query_is_parsed() -> None:
    asked = {"kind": " node_joined ", "severity": "error", "subject": "n1", "before": "7", "else": "x"}
    assert event_filter_of(asked) == EventFilter(kind="node_joined", severity="error", subject="n1", before=7)
    assert event_filter_of({}) == EventFilter()
    with pytest.raises(WrongLogQueryError, match="severity"):
        event_filter_of({"severity": "loud"})
