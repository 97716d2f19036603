from __future__ import annotations

import html
import re
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession

from echo_hub.dashboard import run_now
from echo_hub.dashboard.fleet import FOREMOST_SHOWN
from echo_hub.dashboard.model import DisseminationView, Doing, WorkView
from echo_hub.dashboard.operator_page import (
    EVALUATIONS_SHOWN,
    TICKS_SHOWN,
    newest_evaluations,
    rail_ticks,
)


async def page(hub: ClientSession, path: str = "/") -> str:
    async with hub.get(path) as response:
        assert response.status == 200
        return await response.text()


async def test_the_page_shows_the_runs_state(hub: ClientSession) -> None:
    text = await page(hub)
    assert '<span class="big" id="step">37</span>' in text
    assert "<title>37/60 · echo · Echo</title>" in text
    assert "<b>19,960</b> leased = <b>18,944</b> trained + <b>326</b> dropped + <b>690</b> in flight" in text
    for word in ("cobalt-heron", "attic-pc", "llama_cpp", "sampling", "stale", "All fetches: 74 by swarm"):
        assert word in text
    assert "No node yet" not in text


async def test_without_a_node_the_page_says_how_one_joins(open_hub: Any, make_source: Any) -> None:
    text = await page(await open_hub(make_source(names=())))
    assert "No node yet" in text
    assert "echo-node join http://192.168.1.20:8710" in text
    assert "No step yet" in text
    assert "No rollout is leased yet" in text


async def test_faults_are_shown_first(open_hub: Any, source: Any) -> None:
    source.problems = ("The learner <b>is</b> down.",)
    text = await page(await open_hub(source))
    assert "Needs attention" in text
    assert "The learner &lt;b&gt;is&lt;/b&gt; down." in text


async def test_a_version_on_its_way_is_followed(open_hub: Any, source: Any) -> None:
    hub = await open_hub(source)
    assert "2 of 2 nodes hold version 37." in await page(hub)
    assert "430\u202fkB<small> of 1.41\u202fMB</small>" in await page(hub)
    source.spread = DisseminationView(
        policy_version=37,
        carrier="delta",
        way="web_seed",
        size_bytes=9,
        payload_bytes=3,
        since_s=0.5,
        num_told=3,
        num_reached=1,
        share_arrived=0.75,
    )
    source.changes.notify()
    text = await page(hub)
    assert "Version 37 has been on its way by web seed for 0.5\u202fs: 1 of 3 nodes have it, and 75.0\u202f%" in text
    source.spread = replace(source.spread, num_reached=3)
    source.changes.notify()
    assert "2 of 2 nodes hold version 37." in await page(hub)


async def test_the_learners_idle_share_and_its_reasons_are_shown(
    open_hub: Any, make_source: Any, hostile_names: tuple[str, ...]
) -> None:
    text = await page(await open_hub(make_source(step=37)))
    assert "At this pace, the learner waits 23% of the time: it takes 165 rollouts/s, the nodes return 128." in text
    for words in ("waiting for rollouts", "hand-off to the learner", "evaluation", "start of the run"):
        assert f"</span>{words}</th>" in text
    assert "learner down</th>" not in text, "the learner was not down"
    assert 'To add like <bdi>llama_cpp · cobalt-heron</bdi></th><td class="number">3</td>' in text
    assert "37.2 more are needed" in text
    assert "Known after the first step" in await page(await open_hub(make_source(step=0)))
    hostile = await page(await open_hub(make_source(step=37, names=hostile_names)))
    assert "llama_cpp · <script>" not in hostile


async def test_numbers_that_do_not_add_up_are_shown_as_such(open_hub: Any, source: Any) -> None:
    run = await source.run_view()
    broken = replace(run, accounting=replace(run.accounting, leased=run.accounting.leased + 1))

    async def run_view() -> Any:
        return broken

    source.run_view = run_view
    text = await page(await open_hub(source))
    assert 'class="equation wrong"' in text
    assert "leased ≠" in text


async def test_the_page_lists_the_noteworthy_nodes_and_counts_all(open_hub: Any, make_source: Any) -> None:
    hub = await open_hub(make_source(names=tuple(f"n{i}" for i in range(30)), step=9))
    text = await page(hub)
    section = text[text.index('id="nodes"') :]
    shown = re.findall(r'<a class="name"[^>]*><bdi>(n\d+)</bdi>', section)
    assert len(shown) == FOREMOST_SHOWN and set(shown[:6]) == {"n2", "n6", "n10", "n14", "n18", "n22"}
    assert '<a class="activity away" href="/fleet?state=away">3 away</a>' in section
    assert '<a href="/fleet">All nodes</a>' in section and "/actions/" not in section


async def test_the_evaluations_are_the_newest_and_the_bases(open_hub: Any, source: Any) -> None:
    text = await page(await open_hub(source))
    rows = re.findall(r"<tr><th[^>]*>([^<]+)</th>.*", text[text.index('<tbody id="evaluations"') :])[:3]
    assert rows == ["30", "15", "base"]
    assert "87.7\u202f%<small> ± 2.1\u202f%</small>" in text
    run = await source.run_view()
    many = replace(run, evaluations=run.evaluations * 20)
    shown = newest_evaluations(many)
    assert len(shown) == EVALUATIONS_SHOWN
    assert (shown[0], shown[-1]) == (run.evaluations[-1], run.evaluations[0])
    assert len(rail_ticks(replace(run, evaluations=run.evaluations * 200))) <= TICKS_SHOWN


async def test_ticks_lie_where_their_version_does(source: Any) -> None:
    assert [place for place, _ in rail_ticks(await source.run_view())] == [0, 250, 500]


def top(text: str) -> str:
    """Return the visible words of the page's first screen."""
    part = text[text.index('<section class="top"') : text.index('<nav class="planes"')]
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", part).split()))


async def test_the_first_screen_answers_three_questions(open_hub: Any, make_source: Any) -> None:
    text = top(await page(await open_hub(make_source(step=37))))
    assert "Is it learning? Yes, the reward rises" in text
    assert "Held-out accuracy 87.7 % ± 2.1 %, the base model's 46.0 %." in text
    assert "Is it fed? Mostly The learner was idle for 30 % of the last 2 min 28 s" in text
    assert "Is anything wrong? Nothing" in text and "500 checks, 1 failed, 1 in quarantine. The hub is ready." in text
    assert "to go" in text


@pytest.mark.parametrize("doing", [Doing.LACKS_NODES, Doing.LEARNER_DOWN, Doing.PAUSED, Doing.DRAINED, Doing.STARTING])
async def test_a_run_that_waits_is_not_called_running_and_has_no_time_to_go(
    open_hub: Any, source: Any, doing: Doing
) -> None:
    source.doing = doing
    text = top(await page(await open_hub(source)))
    assert "running" not in text and "to go" not in text and "training" not in text.split(" async")[0]
    assert f"No: {run_now.WORDS[doing][0]}" in text or doing is Doing.STARTING


async def test_a_run_without_steps_for_long_is_stalled(open_hub: Any, source: Any) -> None:
    source.waited_s = 900.0
    text = top(await page(await open_hub(source)))
    assert text.startswith("echo stalled ") and "Is it fed? No: stalled" in text and "No step for 15 min" in text
    assert "running" not in text and "to go" not in text


async def test_a_finished_run_is_over(open_hub: Any, make_source: Any) -> None:
    text = top(await page(await open_hub(make_source(step=60))))
    assert text.startswith("echo finished ") and "took 4 min 2 s" in text and "Is it fed? The run is over" in text
    assert "running" not in text and "to go" not in text and "No node yet" not in text


async def test_staleness_and_lengths_of_received_rollouts_are_shown(open_hub: Any, make_source: Any) -> None:
    text = await page(await open_hub(make_source(step=37)))
    ages = text[text.index('id="ages"') :]
    assert re.findall(r'<th scope="row" class="number">(\d)</th><td class="number">([\d,]+)</td>', ages)[:3] == [
        *(("0", "310"), ("1", "1,204"), ("2", "534"))
    ]
    lengths = text[text.index('id="lengths"') :]
    assert "The axis ends at 8 tokens" in lengths and "</span>no advantage</th>" in lengths
    empty = await page(await open_hub(make_source(names=())))
    assert "No completion has been received yet." in empty and WorkView().lengths == ()


async def test_a_run_for_tenants_alone_has_no_parts_about_training(open_hub: Any, source: Any) -> None:
    about_training = ('id="ages"', 'id="lengths"', 'id="capacity"', 'id="versions"', 'href="#dissemination"')
    text = await page(await open_hub(source))
    assert all(part in text for part in about_training)
    source.trains = False
    text = await page(await open_hub(source))
    assert not [part for part in about_training if part in text]
    assert 'id="accounting"' in text and "first step" not in text


async def test_how_far_each_node_is_off(open_hub: Any, source: Any, hostile_names: tuple[str, ...]) -> None:
    text = await page(await open_hub(source))
    rows = text[text.index('id="mismatch"') : text.index('id="cost-section"')]
    assert re.findall(r"<bdi>([^<]*)</bdi></a></th><td[^>]*>([^<]*)<", rows) == [
        *(("attic-pc", "0.0021"), ("cobalt-heron", "0.0004"), ("ffffffff", "0.0002"))
    ]
    assert f'href="/rollouts?node={"f" * 20}"' in rows


async def test_the_parts_come_in_the_planes_order_and_each_is_linked(hub: ClientSession) -> None:
    text = await page(hub)
    links = re.findall(r'href="#([\w-]+)"', text[text.index('<nav class="planes"') :].partition("</nav>")[0])
    assert links[:5] == ["learning", "rollout", "dissemination", "trust-section", "cost-section"]
    places = [text.index(f' id="{link}"') for link in links]
    assert places == sorted(places)
