import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from echo_node import panel
from echo_node.panel import (
    PLAIN_EVERY_S,
    NodeSnapshot,
    PlainPanel,
    credit,
    from_json,
    rank,
    rows,
    summary,
)
from echo_shared.cage.description import Held
from echo_shared.sampling.prefix_cache import KeptKeys

SNAPSHOT = NodeSnapshot(
    pid=1,
    node_id="abc",
    name="a node",
    backend="llama_cpp",
    device="cpu",
    hub="http://127.0.0.1:8710",
    connected=True,
    activity="sampling",
    hub_fingerprint="aaaa bbbb",
    run_name="echo",
    policy_version=12,
    published_version=13,
    capacity=16,
    held_rollouts=3,
    tokens_per_s=812.4,
    drawn_tokens_per_s=640.2,
    rollouts={"leased": 3, "sent": 2, "received": 1, "scored": 0, "trained": 40, "dropped": 5, "dropped:stale": 5},
    fetching={"Policy version 13": (500_000, 1_500_000)},
    problems={"disk_full": "the disk is full"},
)


TOTALS = {
    "trained": 39_544,
    "trained_tokens": 5_139_912,
    "evaluated": 412,
    "dropped": {"stale": 7},
    "others_checked": 3,
    "share": 0.125,
    "rank": 3,
    "num_ranked": 57,
}


def test_all_that_matters_is_shown() -> None:
    shown = dict(rows(SNAPSHOT))
    assert shown["receipts"] == "2 wait for the hub, 1 with the hub, 40 trained, 0 evaluated, 5 dropped (5 stale)"
    assert shown["policy"] == "version 12; newest published: 13"
    assert shown["fetching"] == "Policy version 13: 0.5 of 1.5 MB (33 %)"
    assert shown["problem"] == "the disk is full"
    assert shown["hub"] == "echo at http://127.0.0.1:8710"
    absent = {"credit", "rank", "page", "asks for", "checked", "GPU", "other nodes", "share", "awake", "works for"}
    absent |= {"kept keys"}
    assert not absent & shown.keys()
    assert dict(rows(replace(SNAPSHOT, links="linked with 3 of 7 nodes")))["other nodes"] == "linked with 3 of 7 nodes"
    held = Held(by=("seccomp",), lacks={"reading": "no Landlock"})
    assert dict(rows(replace(SNAPSHOT, cage=held.as_json())))["engine's cage"] == held.sentence
    assert dict(rows(replace(SNAPSHOT, hub_gpu=0.85)))["GPU"] == "shared with your own hub, which uses 85% of it"
    assert dict(rows(replace(SNAPSHOT, works_for=("Ada", "tenant-9f"))))["works for"] == "Ada, tenant-9f"
    assert dict(rows(replace(SNAPSHOT, router="opens no ports")))["router"] == "opens no ports"
    kept = asdict(KeptKeys(kept_bytes=12_345_678, hits=31, tokens=40_000))
    told = dict(rows(replace(SNAPSHOT, kept_keys=kept)))["kept keys"]
    assert told == "12.3 MB; 31 turns began with them (40,000 tokens)"
    limited = dict(rows(replace(SNAPSHOT, share=0.25, share_reason="25 % of the GPU's time", awake="kept by GNOME")))
    assert (limited["share"], limited["awake"]) == ("25 % of the GPU's time", "kept by GNOME")
    asking = dict(rows(replace(SNAPSHOT, state="standby", reason="It is too slow.", cost_per_hour=0.4)))
    assert asking["state"] == "standby. It is too slow."
    assert asking["asks for"] == "$0.4 an hour, while it is active"


def test_the_time_left_of_fetches_and_conversions_is_shown() -> None:
    converted = "The base model, converted for llama.cpp"
    shown = dict(
        rows(
            replace(
                SNAPSHOT,
                preparing={converted: (60_000_000, 240_000_000)},
                left_s={converted: 185.0, "Policy version 13": 4.0},
            )
        )
    )
    assert shown["fetching"].endswith("0.5 of 1.5 MB (33 %), about 4 s left")
    assert shown["preparing"] == f"{converted}: 60.0 of 240.0 MB (25 %), about 3 min left"


def test_the_hubs_totals_are_shown_next_to_this_computers_counts() -> None:
    shown = dict(rows(replace(SNAPSHOT, totals=TOTALS, page="http://hub/leaderboard?node=abc")))
    assert shown["credit"].startswith("39,544 trained (5,139,912 tokens), 412 evaluated, 7 dropped (7 stale)")
    assert shown["credit"].endswith("3 of others checked: 12.5% of all useful work")
    assert "40 trained" in shown["receipts"]
    assert (shown["rank"], shown["page"]) == ("3 of 57", "http://hub/leaderboard?node=abc")
    assert rank({**TOTALS, "rank": None}).startswith("none yet")
    assert "412 evaluated, 5 answered (60 tokens), 7 dropped" in credit(
        {**TOTALS, "answered": 5, "answered_tokens": 60}
    )
    assert "412 evaluated, 5 answered, 7 dropped" in credit({**TOTALS, "answered": 5}), "from an older hub"


def test_one_line_sums_up_the_node() -> None:
    assert summary(SNAPSHOT) == (
        "sampling, version 12: 48 rollouts sampled, 46 received by the hub, 40 trained, 0 evaluated, 5 dropped; "
        "640 tokens/s in the last minute; its engine can do 812"
    )


def test_a_snapshot_travels_as_json() -> None:
    back = from_json(json.loads(json.dumps(asdict(SNAPSHOT))))
    assert rows(back) == rows(SNAPSHOT)


def test_a_file_gets_a_line_when_the_counts_have_changed(caplog: pytest.LogCaptureFixture) -> None:
    shown = PlainPanel()
    with caplog.at_level("INFO"):
        shown.update(SNAPSHOT)
        shown.update(SNAPSHOT)
    assert [record.message for record in caplog.records] == [summary(SNAPSHOT)]


def test_a_long_fetch_is_reported_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, PLAIN_EVERY_S, PLAIN_EVERY_S + 1.0, 2 * PLAIN_EVERY_S - 1.0, 2 * PLAIN_EVERY_S])
    monkeypatch.setattr(panel, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    shown, counted = PlainPanel(), replace(SNAPSHOT, rollouts={})
    with caplog.at_level("INFO"):
        for fetching in (True, True, True, False, True):
            shown.update(counted if fetching else replace(counted, fetching={}))
    assert [record.message for record in caplog.records] == ["Fetching: Policy version 13: 0.5 of 1.5 MB (33 %)"]


@pytest.mark.parametrize(
    ("drawn", "can", "said"),
    [
        (None, 0.0, "not known yet; its engine is not measured"),
        (None, 63.0, "not known yet; its engine can do 63 tokens/s"),
        (0.0, 63.0, "0 tokens/s in the last minute; its engine can do 63"),
        (14.4, 63.0, "14 tokens/s in the last minute; its engine can do 63"),
    ],
)
def test_the_current_rate_is_shown_before_the_engines_maximum(drawn: float | None, can: float, said: str) -> None:
    assert dict(rows(replace(SNAPSHOT, drawn_tokens_per_s=drawn, tokens_per_s=can)))["speed"] == said
