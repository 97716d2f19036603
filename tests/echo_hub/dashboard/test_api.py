from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession

from echo_hub.dashboard.api import STEPS_PER_ANSWER
from echo_shared.errors import StorageError

SCHEMA = {
    "run": {
        "address",
        *(
            "as_of",
            "run_id",
            "name",
            "trains",
            "mode",
            "task",
            "base_model",
            "join_command",
            "install_command",
            "windows_install_command",
            "state",
            "state_detail",
            "doing",
            "problems",
            "alarms",
            "problem_kinds",
            "health",
            "starting",
        ),
        *("started_at", "finished_at", "steps_total", "trained_step", "published_version", "group_size"),
        *("leasing", "live"),
        *("max_staleness", "mean_reward", "staleness_mean", "staleness_max", "rollouts_per_s", "buffered_groups"),
        *("rollouts_gone_on", "tokens_saved", "turned_away", "judged", "sessions", "curriculum"),
        *("accounting", "evaluations", "versions", "fetches_by_transport", "events"),
        *("newest_step", "accuracy_before", "accuracy_after"),
        *("dissemination", "newest_complete", "nodes_on_newest", "nodes_connected", "nodes_known", "nodes_useful"),
        *("uplink_bytes_s", "capacity"),
        *("cost", "trust", "work", "siblings"),
        *("tasks", "evaluation_sets", "first_version", "lineage"),
    },
    "trust": {
        *("checks", "failed_checks", "abandoned_checks", "waiting_checks", "quarantined", "suspended"),
        *("checkers", "opinions", "disagreements", "outvoted", "checked_tokens", "mismatch", "lagging", "coarser"),
    },
    "cost": {
        *("spend_per_hour", "spend_cap_per_hour", "total", "active_s", "per_trained_rollout"),
        *("nodes_active", "nodes_standing_by"),
    },
    "capacity": {
        *("window_s", "idle_share", "idle_by_reason", "step_s", "broadcast_s", "predicted_utilisation", "verdict"),
        *("rollouts_per_s", "needed_per_s", "missing_per_s", "advised_nodes", "advised_staleness", "advised_interval"),
    },
    "nodes": {
        *("node_id", "name", "backend", "device", "connected", "activity", "policy_version", "capacity", "in_flight"),
        *(
            "tokens_per_s",
            "received",
            "trained",
            "evaluated",
            "answered_rollouts",
            "answered_tokens",
            "dropped",
            "last_seen",
            "banned",
        ),
        *("first_seen", "banned_at", "invite", "trained_rollouts", "trained_tokens", "evaluated_rollouts", "share"),
        *("costs_per_hour", "standby", "precision", "num_links", "num_punched"),
        *("standing", "standing_reason", "standing_since", "verified_in_a_row", "checks", "failed_checks"),
        *("last_checked", "others_checked", "others_checked_tokens"),
        *("cost_per_hour", "power_watts", "cost", "active_s"),
    },
    "steps": {
        *("by_task", "components", "fitted_tokens", "out_of_memory"),
        *("step", "trained_at", "num_rollouts", "num_tokens", "mean_reward", "staleness_mean", "staleness_max"),
        *("seconds", "loss", "grad_norm", "mismatch_kl", "clip_fraction", "ratio_mean", "ratio_max", "base_kl"),
        *("share_without_advantage", "share_truncated", "tokens_per_s", "eval_s", "gap_s", "updated"),
        *("share_mixed", "token_staleness", "held_back", "groups_left_out", "learning_rate_used"),
        *("entropy", "entropy_weight", "reward_std", "reward_std_within", "completion_length", "completion_length_max"),
        *("groups_without_advantage", "rollouts_masked", "rollouts_unselected", "rollouts_vetoed", "correction_weight"),
        *("correction_share", "completion_tokens", "computed_tokens", "train_s", "planned_at", "num_groups", "dropped"),
    },
    "leaderboard": {
        *("rank", "node", "name", "trained_rollouts", "trained_tokens", "evaluated_rollouts", "share", "last_seen"),
        *("others_checked", "others_checked_tokens"),
        *("kind", "team", "members", "rollouts", "tokens", "recent", "steps", "streak_days", "longest_streak"),
        *("first_day", "last_day", "elsewhere_rollouts", "elsewhere_tokens"),
        *("answered_rollouts", "answered_tokens"),
    },
    "accounting": {"leased", "trained", "evaluated", "answered", "dropped", "in_flight"},
    "evaluations": {
        *("name", "components"),
        *("policy_version", "accuracy", "accuracy_error", "num_problems", "mean_reward", "mean_tokens"),
        *("share_truncated", "samples", "mean_at_k", "mean_at_k_error", "pass_at", "seconds", "evaluated_at"),
        *("kind", "num_unscored"),
    },
    "versions": {
        *("policy_version", "published_at", "size_bytes", "dissemination_p50_s", "dissemination_max_s"),
        *("fetches_by_transport", "bytes_by_transport", "dissemination_p95_s", "payload_bytes", "carrier", "way"),
    },
    "events": {"number", "at", "kind", "severity", "subject", "text", "data", "warning"},
}
"""Names in the JSON that other programs rely on. A new name may be added, but none may be removed."""


async def get(hub: ClientSession, path: str, status: int = 200) -> Any:
    async with hub.get(path) as response:
        assert response.status == status
        assert response.content_type == "application/json"
        return await response.json()


async def test_the_fields_are_the_promised_ones(hub: ClientSession) -> None:
    run = await get(hub, "/api/v1/run")
    assert set(run) == SCHEMA["run"]
    assert set(run["newest_step"]) == SCHEMA["steps"]
    assert set(run["accounting"]) == SCHEMA["accounting"]
    assert set(run["capacity"]) == SCHEMA["capacity"]
    assert set(run["cost"]) == SCHEMA["cost"]
    assert set(run["trust"]) == SCHEMA["trust"]
    assert set(run["capacity"]["advised_nodes"][0]) == {"kind", "count"}
    for name in ("evaluations", "versions", "events"):
        assert set(run[name][0]) == SCHEMA[name]
    for name in ("nodes", "steps", "leaderboard"):
        answer = await get(hub, f"/api/v1/{name}")
        assert set(answer) == ({name} if name == "steps" else {name, "found"})
        assert set(answer[name][0]) == SCHEMA[name]


async def test_the_figures_are_the_sources(hub: ClientSession, source: Any) -> None:
    run = await get(hub, "/api/v1/run")
    assert (run["state"], run["trained_step"], run["steps_total"]) == ("running", 37, 60)
    assert run["accounting"]["dropped"] == {"stale": 296, "expired": 18, "duplicate": 12}
    board = (await get(hub, "/api/v1/leaderboard"))["leaderboard"]
    assert [row["rank"] for row in board] == [1, 2]
    assert [node["name"] for node in (await get(hub, "/api/v1/nodes"))["nodes"]] == sorted(source.names)


async def test_nodes_are_filtered_sorted_and_cut_when_asked(open_hub: Any, make_source: Any) -> None:
    hub = await open_hub(make_source(names=("b", "c", "a", "d"), step=5))

    async def names(query: str) -> tuple[list[str], int]:
        answer = await get(hub, f"/api/v1/nodes{query}")
        return [node["name"] for node in answer["nodes"]], answer["found"]

    assert await names("") == (["a", "b", "c", "d"], 4), "all nodes, in stored order: all have done equal work"
    assert await names("?sort=name&limit=2") == (["a", "b"], 4)
    assert await names("?sort=name&limit=2&after=2") == (["c", "d"], 4)
    assert await names("?engine=torch&sort=-name") == (["d", "c"], 2)
    assert await names("?standing=quarantined") == (["a"], 1)
    for wrong in ("state=drunk", "standing=lovely", "after=-1", "limit=0", "limit=x"):
        async with hub.get(f"/api/v1/nodes?{wrong}") as response:
            assert response.status == 400 and wrong.partition("=")[0] in (await response.json())["error"]


async def test_steps_are_those_after_the_given_one(hub: ClientSession) -> None:
    assert [step["step"] for step in (await get(hub, "/api/v1/steps?since=34"))["steps"]] == [35, 36, 37]
    assert len((await get(hub, "/api/v1/steps"))["steps"]) == 37
    assert (await get(hub, "/api/v1/steps?since=37"))["steps"] == []


async def test_a_long_leaderboard_takes_several_answers(hub: ClientSession) -> None:
    ranks = [
        [row["rank"] for row in (await get(hub, f"/api/v1/leaderboard?limit=1&after={after}"))["leaderboard"]]
        for after in (0, 1, 2, 10**9)
    ]
    assert ranks == [[1], [2], [], []]
    for wrong in ("after=-1", "limit=0", "limit=x"):
        async with hub.get(f"/api/v1/leaderboard?{wrong}") as answer:
            assert answer.status == 400
    assert await get(hub, "/api/v1/teams") == {"teams": [], "found": 0}


async def test_many_steps_take_several_answers(hub: ClientSession, source: Any) -> None:
    source.total = source.step = 2 * STEPS_PER_ANSWER + 7
    numbers: list[int] = []
    lengths = []
    while not lengths or lengths[-1] == STEPS_PER_ANSWER:
        answer = await get(hub, f"/api/v1/steps?since={numbers[-1] if numbers else 0}")
        numbers += [step["step"] for step in answer["steps"]]
        lengths.append(len(answer["steps"]))
    assert lengths == [STEPS_PER_ANSWER, STEPS_PER_ANSWER, 7]
    assert numbers == list(range(1, source.step + 1))


@pytest.mark.parametrize("since", ["-1", "x", "", "1.5", "²", "9" * 30, "1e3"])
async def test_a_wrong_since_is_refused_with_the_valid_form(hub: ClientSession, since: str) -> None:
    assert "a step's number" in (await get(hub, f"/api/v1/steps?since={since}", 400))["error"]


async def test_a_degraded_hub_is_still_live(hub: ClientSession, source: Any) -> None:
    source.starting, source.problems = True, ("The learner is down.",)
    reads = source.num_reads
    said = {"status": "ok", "state": "degraded", "reasons": ["The learner is down."]}
    assert await get(hub, "/healthz") == said
    assert source.num_reads == reads, "the check reads nothing"


async def test_every_state_has_a_name_and_strangers_get_no_reason(open_hub: Any, source: Any) -> None:
    hub, public = await open_hub(source), await open_hub(source, token="")
    assert await get(hub, "/healthz") == {"status": "ok", "state": "ready", "reasons": []}
    source.starting = True
    assert await get(public, "/healthz") == {"status": "ok", "state": "starting"}
    source.advance(100)
    assert await get(public, "/healthz") == {"status": "ok", "state": "finished"}
    assert (await get(hub, "/api/v1/run"))["health"] == {"state": "finished", "reasons": []}


async def test_ready_starting_and_failing_are_distinguished(hub: ClientSession, source: Any) -> None:
    assert await get(hub, "/readyz") == {"status": "ready", "problems": [], "detail": ""}
    source.starting, source.names = True, ()
    detail = "Waiting for a first node."
    assert await get(hub, "/readyz", 503) == {"status": "starting", "problems": [], "detail": detail}
    source.problems = ("The learner is down.",)
    said = {"status": "failing", "problems": ["The learner is down."], "detail": detail}
    assert await get(hub, "/readyz", 503) == said


async def test_a_hub_that_cannot_read_its_books_is_not_ready(
    hub: ClientSession, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise StorageError("The hub's database cannot be read.", got="disk I/O error")

    monkeypatch.setattr(source, "run_view", fail)
    said = {"status": "failing", "problems": ["The hub's database cannot be read."], "detail": ""}
    assert await get(hub, "/readyz", 503) == said
    assert (await get(hub, "/healthz"))["status"] == "ok"


async def next_event(response: ClientResponse) -> dict[str, Any]:
    async for line in response.content:
        if line.startswith(b"data: "):
            event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            return event
    raise AssertionError("the stream ended")


async def test_a_change_is_reported_once_to_every_viewer(hub: ClientSession, source: Any) -> None:
    async with hub.get("/api/v1/events") as first, hub.get("/api/v1/events") as second:
        assert first.content_type == "text/event-stream"
        assert "script-src 'self'" in first.headers["Content-Security-Policy"]
        for viewer in (first, second):
            assert await next_event(viewer) == {"state": "running", "trained_step": 37, "published_version": 37}
        source.advance()
        for viewer in (first, second):
            assert (await next_event(viewer))["trained_step"] == 38
        source.advance(100)
        for viewer in (first, second):
            assert await next_event(viewer) == {"state": "finished", "trained_step": 60, "published_version": 60}


async def test_a_quiet_stream_still_beats(open_hub: Any, source: Any) -> None:
    hub = await open_hub(source, heartbeat_s=0.02)
    async with hub.get("/api/v1/events") as viewer:
        await next_event(viewer)
        beats = 0
        async for line in viewer.content:
            beats += line.startswith(b":")
            if beats == 3:
                break
        source.advance()
        assert (await next_event(viewer))["trained_step"] == 38


async def test_strangers_are_told_whether_a_hub_is_ready_and_not_why(open_hub: Any, source: Any) -> None:
    source.problems = ("The learner is down.",)
    assert await get(await open_hub(source, token=""), "/readyz", 503) == {"status": "failing"}
