import io
import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from echo_node import panel
from echo_node.host.cage.description import Held
from echo_node.panel import (
    PLAIN_EVERY_S,
    LivePanel,
    NodeSnapshot,
    PlainPanel,
    from_json,
    open_panel,
    rows,
    summary,
    table,
)

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
    rollouts={"leased": 3, "sent": 2, "received": 1, "scored": 0, "trained": 40, "dropped": 5, "dropped:stale": 5},
    fetching={"Policy version 13": (500_000, 1_500_000)},
    problems={"disk_full": "the disk is full"},
)


def test_all_that_matters_is_shown() -> None:
    shown = dict(rows(SNAPSHOT))
    assert "40 trained" in shown["rollouts"] and "5 dropped" not in shown["policy"]
    assert "5 (5 stale) dropped" in shown["rollouts"]
    assert shown["policy"] == "version 12; newest published: 13"
    assert shown["fetching"] == "Policy version 13: 0.5 of 1.5 MB (33 %)"
    assert shown["problem"] == "the disk is full"
    assert "work" not in shown and "asks for" not in shown
    waiting = dict(rows(replace(SNAPSHOT, standby="Standing by: it is too slow.", cost_per_hour=0.4)))
    assert waiting["work"] == "Standing by: it is too slow."
    assert waiting["asks for"] == "$0.4 an hour, while it is active"
    held = Held(by=("seccomp",), lacks={"reading": "no Landlock"})
    assert dict(rows(replace(SNAPSHOT, cage=held.as_json())))["engine's cage"] == held.sentence
    assert "not connected" in dict(rows(replace(SNAPSHOT, connected=False)))["hub"]


def test_one_line_sums_it_up() -> None:
    assert summary(SNAPSHOT) == (
        "sampling, version 12: 48 rollouts sampled, 46 received by the hub, 40 trained, 0 evaluated, 5 dropped; "
        "812 tokens/s"
    )


def test_a_snapshot_travels_as_json() -> None:
    back = from_json(json.loads(json.dumps(asdict(SNAPSHOT))))
    assert rows(back) == rows(SNAPSHOT)


def test_a_terminal_gets_a_panel_and_a_file_gets_lines(caplog: pytest.LogCaptureFixture) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    with open_panel(terminal, quiet=False) as shown:
        assert isinstance(shown, LivePanel)
        shown.update(SNAPSHOT)
    plain = Console(file=io.StringIO(), width=120)
    with open_panel(plain, quiet=False) as shown, caplog.at_level("INFO"):
        assert isinstance(shown, PlainPanel)
        shown.update(SNAPSHOT)
        shown.update(SNAPSHOT)
    assert [record.message for record in caplog.records] == [summary(SNAPSHOT)]


def test_a_long_fetch_is_told_now_and_then(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, PLAIN_EVERY_S, PLAIN_EVERY_S + 1.0, 2 * PLAIN_EVERY_S - 1.0, 2 * PLAIN_EVERY_S])
    monkeypatch.setattr(panel.time, "monotonic", lambda: next(clock))
    shown, counted = PlainPanel(), replace(SNAPSHOT, rollouts={})
    with caplog.at_level("INFO"):
        for fetching in (True, True, True, False, True):
            shown.update(counted if fetching else replace(counted, fetching={}))
    assert [record.message for record in caplog.records] == ["Fetching: Policy version 13: 0.5 of 1.5 MB (33 %)"]


def test_a_fetch_has_a_bar_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    console.print(table(SNAPSHOT))
    assert "━━━" in console.file.getvalue()  # type: ignore[attr-defined]


def test_names_from_outside_are_text_not_markup() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(table(replace(SNAPSHOT, run_name="[red]run[/red] [/]")))
    assert "[red]run[/red] [/]" in console.file.getvalue()  # type: ignore[attr-defined]
