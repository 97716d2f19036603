from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import ClientSession
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from echo_hub.dashboard.model import DisseminationView
from scripts.docs.metrics import families

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(hub: ClientSession) -> Samples:
    async with hub.get("/metrics") as response:
        assert response.content_type == "text/plain"
        text = await response.text()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_figures_are_the_sources(hub: ClientSession, source: Any) -> None:
    samples = await scrape(hub)
    run = await source.run_view()
    assert samples["echo_learner_step", ()] == 37
    assert samples["echo_policy_version", ()] == 37
    assert samples["echo_rollouts_total", (("reason", ""), ("state", "trained"))] == run.accounting.trained
    assert samples["echo_rollouts_total", (("reason", "stale"), ("state", "dropped"))] == 296
    assert samples["echo_run_state", (("state", "running"),)] == 1
    assert samples["echo_run_state", (("state", "finished"),)] == 0
    assert (samples["echo_healthy", ()], samples["echo_ready", ()]) == (1, 1)
    assert samples["echo_fetches_total", (("transport", "swarm"),)] == 74
    assert samples["echo_heldout_accuracy", ()] == run.evaluations[-1].greedy.accuracy
    assert samples["echo_heldout_policy_version", ()] == 30
    assert samples["echo_heldout_mean_at_k", (("k", "8"),)] == run.evaluations[-1].mean_at_k
    assert samples["echo_heldout_pass_at_k", (("k", "4"),)] == run.evaluations[-1].pass_at[4]
    assert samples["echo_learner_importance_ratio_max", ()] == run.newest_step.figures["ratio_max"]
    assert samples["echo_learner_train_seconds", ()] == run.newest_step.figures["seconds"]
    assert samples["echo_cost_dollars_total", ()] == run.cost.total
    assert samples["echo_cost_dollars_per_hour", ()] == 0.4
    assert samples["echo_nodes_priced", (("state", "standby"),)] == 2
    newest = run.versions[0].record
    assert samples["echo_version_payload_bytes", ()] == newest.payload_bytes
    assert samples["echo_version_dissemination_seconds", (("share", "0.95"),)] == newest.dissemination_p95_s
    complete = run.versions[1].record
    assert samples["echo_complete_version", ()] == complete.policy_version
    assert samples["echo_complete_version_dissemination_seconds", (("share", "1"),)] == complete.dissemination_max_s
    assert samples["echo_version_fetched_bytes", (("source", "mesh"),)] == newest.bytes_by_transport["mesh"]
    assert samples["echo_hub_uplink_bytes_per_second", ()] == run.uplink_bytes_s
    assert samples["echo_nodes_on_newest_version", ()] == run.nodes_on_newest


async def test_metrics_have_sums_of_nodes_and_single_nodes_on_request(
    hub: ClientSession, open_hub: Any, source: Any
) -> None:
    nodes = [node for node in await source.nodes() if node.connected]
    together = await scrape(hub)
    assert not [name for name, _ in together if name.startswith("echo_node_")]
    assert together["echo_nodes_tokens_per_second", ()] == sum(node.tokens_per_s for node in nodes)
    assert sum(value for (name, _), value in together.items() if name == "echo_nodes_standing") == len(nodes)
    each = await scrape(await open_hub(source, node_series=True))
    label = ("node", nodes[0].totals.node_id)
    assert each["echo_node_tokens_per_second", (label,)] == nodes[0].tokens_per_s
    assert each["echo_node_rollouts_total", (label, ("state", "trained"))] == nodes[0].totals.trained_rollouts


async def test_the_learners_idle_share_and_its_reasons_are_shown(
    hub: ClientSession, open_hub: Any, make_source: Any
) -> None:
    samples = await scrape(hub)
    assert samples["echo_learner_idle_ratio", ()] == pytest.approx(0.3)
    assert samples["echo_learner_idle_reason_ratio", (("reason", "rollouts"),)] == 0.23
    assert samples["echo_capacity_utilisation_ratio", ()] == 0.74
    assert samples["echo_capacity_missing_rollouts_per_second", ()] == 37.2
    assert samples["echo_capacity_nodes_to_add", (("kind", "llama_cpp · cobalt-heron"),)] == 3
    assert ("echo_capacity_staleness_bound_needed", ()) not in samples, "no bound is enough"
    many = await scrape(await open_hub(make_source(step=37, names=("a", "b", "c", "d"))))
    kinds = [labels for name, labels in many if name == "echo_capacity_nodes_to_add"]
    assert len(kinds) == 3, "no number of the fourth kind is enough"
    before = await scrape(await open_hub(make_source(step=0)))
    assert not [name for name, _ in before if name.startswith(("echo_capacity", "echo_learner_idle"))]


async def test_the_accounting_identity_holds_among_the_metrics(hub: ClientSession) -> None:
    samples = await scrape(hub)
    ended = sum(value for (name, _), value in samples.items() if name == "echo_rollouts_total")
    assert samples["echo_rollouts_leased_total", ()] == ended + samples["echo_rollouts_in_flight", ()]


async def test_check_results_are_counted_by_class(hub: ClientSession) -> None:
    samples = await scrape(hub)
    q4 = ("numerics", "llama_cpp/q4_k_m/cpu")
    assert samples["echo_checks_total", (q4, ("result", "passed"))] == 89
    assert samples["echo_checks_total", (q4, ("result", "failed"))] == 1
    assert samples["echo_checks_abandoned_total", ()] == 3
    assert (samples["echo_checks_waiting", ()], samples["echo_nodes_quarantined", ()]) == (2, 1)
    standings = [dict(labels)["standing"] for name, labels in samples if name == "echo_nodes_standing"]
    assert "new" in standings


async def test_continued_rollouts_are_counted(hub: ClientSession) -> None:
    samples = await scrape(hub)
    assert samples["echo_rollouts_gone_on_total", ()] == 19
    assert samples["echo_tokens_saved_total", ()] == 4_100


async def test_sessions_are_counted(hub: ClientSession) -> None:
    samples = await scrape(hub)
    assert (samples["echo_sessions_open", ()], samples["echo_session_slots", ()]) == (6, 8)
    assert samples["echo_sessions_waiting", ()] == 2


async def test_refused_connections_are_counted(hub: ClientSession) -> None:
    labels = (("reason", "head_too_late"), ("what", "connection"))
    assert (await scrape(hub))["echo_turned_away_total", labels] == 7


async def test_each_kind_of_problem_has_a_sample(hub: ClientSession, open_hub: Any, source: Any) -> None:
    assert not [name for name, _ in await scrape(hub) if name == "echo_problem"]
    source.problem_kinds = ("disk", "attack")
    samples = await scrape(await open_hub(source))
    assert {labels: value for (name, labels), value in samples.items() if name == "echo_problem"} == {
        (("kind", "disk"),): 1.0,
        (("kind", "attack"),): 1.0,
    }


async def test_the_shipped_alerting_rules_use_metrics_that_are_shown(open_hub: Any, source: Any) -> None:
    rules = (Path(__file__).parents[3] / "installers/prometheus/echo.rules.yml").read_text(encoding="utf-8")
    (group,) = yaml.safe_load(rules)["groups"]
    used = {name for rule in group["rules"] for name in re.findall(r"\becho_\w+", rule["expr"])}
    source.problem_kinds = ("disk",)
    assert used and used <= {name for name, _ in await scrape(await open_hub(source))}


async def test_judge_requests_are_counted(hub: ClientSession) -> None:
    samples, judge = await scrape(hub), ("judge", "style")
    assert samples["echo_judge_calls_total", (judge,)] == 9
    assert samples["echo_judge_failures_total", (judge, ("why", "unanswered"))] == 2
    assert samples["echo_judge_failures_total", (judge, ("why", "no_verdict"))] == 1
    assert samples["echo_judge_tokens_total", (judge, ("of", "prompt"))] == 900
    assert samples["echo_judge_tokens_total", (judge, ("of", "completion"))] == 70


async def test_unknown_values_have_no_sample(open_hub: Any, make_source: Any) -> None:
    samples = await scrape(await open_hub(make_source(names=())))
    assert samples["echo_learner_step", ()] == 0
    names = {name for name, _ in samples}
    assert not names & {"echo_mean_reward", "echo_heldout_accuracy", "echo_learner_loss", "echo_version_size_bytes"}


async def test_hostile_names_stay_inside_their_label(
    open_hub: Any, make_source: Any, hostile_names: tuple[str, ...]
) -> None:
    names = (*hostile_names, 'x"} 1\necho_learner_step 999\n', "back\\slash")
    samples = await scrape(await open_hub(make_source(names=names, step=12), node_series=True))
    assert samples["echo_learner_step", ()] == 12
    shown = {dict(labels)["name"] for name, labels in samples if name == "echo_node_info"}
    assert shown == set(names)


async def test_openmetrics_is_served_on_request(hub: ClientSession) -> None:
    async with hub.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}) as response:
        assert response.content_type == "application/openmetrics-text"
        families = openmetrics_parser.text_string_to_metric_families(await response.text())  # type: ignore[no-untyped-call]
        assert "echo_rollouts" in {family.name for family in families}


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=zzz",
        "application/openmetrics-text; version=",
        "application/openmetrics-text; version=1.0.0; version=2",
        "application/openmetrics-text; version=99999999999999999999.0.0",
        "application/openmetrics-text; version=1.0.0; escaping=zzz",
        "application/openmetrics-text; version=" + "9" * 5_000 + ".0",
        "text/plain; version=zzz; escaping=allow-utf-8",
        "text/plain; version=",
        "application/openmetrics-text; version=2.\udc80",
        "application/openmetrics-text;version=²",
        ",;=,;;==",
        "\udcff\udcfe",
    ],
)
async def test_a_scraper_gets_metrics_for_every_accept_header(hub: ClientSession, accept: str) -> None:
    async with hub.get("/metrics", headers={"Accept": accept}) as response:
        assert response.status == 200
        assert "echo_learner_step 37" in await response.text()


@pytest.mark.parametrize("step", [0, 37])
async def test_promtool_finds_nothing_to_complain_of(open_hub: Any, make_source: Any, step: int) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on this machine")
    hub = await open_hub(make_source(step=step), node_series=True)
    async with hub.get("/metrics") as response:
        text = await response.read()
    promtool = await asyncio.create_subprocess_exec(
        *("promtool", "check", "metrics"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await promtool.communicate(text)
    assert (promtool.returncode, said.decode()) == (0, "")


async def test_the_reference_lists_exactly_the_exported_metrics(open_hub: Any, source: Any) -> None:
    source.spread = DisseminationView(
        policy_version=37,
        carrier="bin",
        way="broadcast",
        size_bytes=1,
        payload_bytes=1,
        since_s=1.0,
        num_told=3,
        num_reached=2,
        share_arrived=0.5,
    )
    hub = await open_hub(source, node_series=True)
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with hub.get("/metrics", headers=accept) as response:
        shown = list(openmetrics_parser.text_string_to_metric_families(await response.text()))
    suffixes = {"counter": "_total", "info": "_info"}
    told = {one.name: one for one in families()}
    assert {family.name + suffixes.get(family.type, "") for family in shown} == set(told)
    for family in shown:
        one = told[family.name + suffixes.get(family.type, "")]
        assert (one.kind, one.about) == (family.type, family.documentation)
        if one.kind != "info":
            assert all(set(sample.labels) == set(one.labels) for sample in family.samples)
