from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from echo_hub.core.accounting.effects import SendLease
from echo_hub.dashboard.pages import routes
from echo_hub.operation.state import NO_NODES
from echo_hub.oversight.service import guard_of
from echo_hub.sinks.reading import EntryReader, Position
from echo_hub.sinks.tensorboard import TensorBoard
from echo_hub.store.events import read_events
from echo_hub.store.store import Store
from echo_hub.views import all_nodes
from echo_hub.views.board import HubBoard
from echo_hub.views.run import LEARNER_IS_DOWN
from echo_shared.records import step_figures
from echo_shared.records.health import Health, HubState
from echo_shared.records.run import EventFilter
from echo_shared.records.step_figures import Chart, StepFigure


async def test_an_empty_run_has_empty_tables(hub: Any) -> None:
    assert (tuple(await hub.pages.nodes()), await hub.pages.steps(0)) == ((), ())


async def test_a_whole_run(hub: Any) -> None:
    await hub.join("a")
    await hub.train_to_the_end()
    steps = await hub.pages.steps(0)
    assert [(step.step, step.num_rollouts, step.num_tokens) for step in steps] == [(1, 4, 12), (2, 4, 12)]
    shown = [[step.figures[name] for name in ("loss", "seconds", "grad_norm")] for step in steps]
    assert shown == [[0.5, 1.5, None]] * 2
    assert await hub.pages.steps(1) == steps[1:]


async def test_a_nodes_full_record_is_found_by_its_whole_id(hub: Any) -> None:
    await hub.join("a")
    await hub.train_to_the_end()
    record = await hub.pages.node("a")
    assert (record.totals.name, record.totals.trained_rollouts) == ("a's laptop", 8)
    assert (record.outcomes[0].outcome, record.outcomes[0].rollouts) == ("trained", 8)
    assert await hub.pages.node("") is None


async def test_rollouts_are_counted_from_the_hubs_start(hub: Any) -> None:
    await hub.join("a")
    await hub.train_to_the_end()
    assert (await hub.pages.run_view()).rollouts_per_s > 0


async def test_the_log_is_on_the_page_and_still_there_after_a_restart(hub: Any) -> None:
    log = logging.getLogger("test.pages")
    log.addHandler(hub.event_log)
    log.warning("the learner died", extra={"event": "learner_died", "data": {"deaths": 1}})
    log.removeHandler(hub.event_log)
    await asyncio.sleep(0)  # Let the event loop pass the line to the driver.
    await hub.driven.driver.commit_noted()
    (event,) = (await hub.pages.run_view()).events
    assert (event.text, event.kind, event.warning, event.data) == (
        "the learner died",
        "learner_died",
        True,
        {"deaths": 1},
    )
    again = Store.open(hub.driven.store.engine.url.render_as_string())
    assert again.read(read_events, EventFilter(), 9) == [event]
    again.close()
    assert await hub.pages.events(EventFilter(kind="node_joined"), 9) == ()


async def test_health_is_of_this_moment(hub: Any) -> None:
    assert hub.pages.health() == Health(state=HubState.LIVE, reasons=(NO_NODES,))
    await hub.join("a")
    await hub.driven.until(lambda: hub.driven.of(SendLease) != [])
    assert hub.pages.health() == Health(state=HubState.READY)
    hub.said = {"learner_is_starting": True}
    assert hub.pages.health().state is HubState.STARTING
    hub.said = {"learner_is_down": True}
    assert hub.pages.health() == Health(state=HubState.DEGRADED, reasons=(LEARNER_IS_DOWN,))
    assert (await hub.pages.run_view()).health == hub.pages.health()
    hub.said = {"finished": True}
    assert hub.pages.health().state is HubState.FINISHED


async def test_a_figure_that_is_added_to_the_table_is_shown_everywhere(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry in the table must be enough for page (chart and column), JSON, /metrics and TensorBoard."""
    added = StepFigure(
        key="surprise",
        label="of the policy",
        about="Mean surprise.",
        unit="nats/token",
        prometheus="echo_learner_surprise",
        chart="surprise",
        column="Surprise",
    )
    monkeypatch.setattr(step_figures, "STEP_FIGURES", (*step_figures.STEP_FIGURES, added))
    chart = Chart(key="surprise", title="Surprise", about="How much is left to chance.", axis="nats/token")
    monkeypatch.setattr(step_figures, "CHARTS", (*step_figures.CHARTS, chart))
    await hub.join("a")
    await hub.train_to_the_end()

    guard = guard_of(hub.config, hub.directory, run_id="r")
    application = web.Application(middlewares=[guard.middleware])
    application.add_routes(routes(hub.pages, guard, {}, board=HubBoard(hub.driven.store)))
    operator = {"Authorization": f"Bearer {guard.credentials.token}"}
    async with TestClient(TestServer(application), headers=operator) as client:
        page = await (await client.get("/")).text()
        metrics = await (await client.get("/metrics")).text()
        (first, _) = (await (await client.get("/api/v1/steps")).json())["steps"]
        (point, _) = (await (await client.get("/api/v1/curves")).json())["points"]
        newest = (await (await client.get("/api/v1/run")).json())["newest_step"]
    assert 'id="chart-surprise"' in page and '"column": "surprise", "error": "", "label": "of the policy"' in page
    assert ">Surprise</th>" in page and ">1.2</td>" in page
    assert "\necho_learner_surprise 1.25\n" in metrics
    assert (first["surprise"], newest["surprise"], point["surprise"]) == (1.25, 1.25, 1.25)

    files, reading = TensorBoard(tmp_path / "tensorboard"), EntryReader(hub.driven.store, Position())
    files.open()
    files.write(reading.read(), reading.position)
    files.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/surprise")] == [1.25, 1.25]


async def test_pages_know_the_foremost_and_the_connected_and_count_all(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_nodes, "MOST_NODES", 1)
    for node_id in ("a", "gone", "here"):
        await hub.join(node_id, capacity=100 if node_id == "a" else 0)
    await hub.train_to_the_end()
    for node_id in ("a", "gone"):
        await hub.nodes.node_left(node_id)
    assert {node.totals.node_id for node in await hub.pages.nodes()} == {"a", "here"}
    view = await hub.pages.run_view()
    assert (view.nodes_known, view.nodes_useful) == (3, 1)


async def test_leases_are_shown_as_of_the_request(hub: Any) -> None:
    """Pages must show one moment, although the coordinator leases more while a thread reads."""
    await hub.join("a")
    live = dict.fromkeys(("a", "b"), 3)
    moment = hub.now()
    moment = replace(moment, status=replace(moment.status, leased_by_node=live))
    read = hub.pages._reading_of_nodes(moment)
    live["a"] = 7
    assert read().here["a"].in_flight == 3
