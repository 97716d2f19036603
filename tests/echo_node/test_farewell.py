from dataclasses import replace

import pytest

from echo_node.farewell import farewell, length
from tests.echo_node.test_panel import SNAPSHOT, TOTALS

ENDED = replace(
    SNAPSHOT,
    started_at=1_000.0,
    drawn_rollouts=48,
    drawn_tokens=6_144,
    since_start={"trained": 30, "dropped": 5, "dropped:stale": 5},
    totals=TOTALS,
    page="http://127.0.0.1:8710/leaderboard?node=abc",
)


def test_the_farewell_sums_up_the_work_and_the_next_step() -> None:
    assert farewell(ENDED, 9_040.0) == [
        "Ran for 2 h 14 min: 48 rollouts, 6,144 tokens drawn.",
        "Since the start: 30 trained, 0 evaluated, 5 dropped (5 stale).",
        "With the hub, waiting for training: 1. The node learns their fate when it runs again.",
        "Finished, but not at the hub: 2. They are sent when the node runs again.",
        "Over all time, by the hub's last count: 39,544 trained (5,139,912 tokens), 412 evaluated, "
        "7 dropped (7 stale), 3 of others checked: 12.5% of all useful work.",
        "Rank: 3 of 57.",
        "Your page: http://127.0.0.1:8710/leaderboard?node=abc",
        "Continue with: echo-node run",
    ]


def test_a_leaving_node_is_told_how_to_rejoin() -> None:
    lines = farewell(ENDED, 9_040.0, leaves=True)
    assert lines[2:4] == ["With the hub, waiting for training: 1.", "Finished, but not at the hub: 2."]
    assert lines[-1] == "Join again with: echo-node join http://127.0.0.1:8710"
    assert not any("again" in line or "echo-node run" in line for line in lines[:-1])


def test_unknown_figures_are_left_out() -> None:
    lines = farewell(replace(SNAPSHOT, rollouts={}, started_at=0.0), 59.0)
    assert lines[0].startswith("Ran for 59 s") and len(lines) == 3


def test_a_hubs_texts_cannot_control_the_terminal() -> None:
    hostile = {**TOTALS, "dropped": {"\x1b[2J\n": 1}}
    said = "".join(farewell(replace(ENDED, totals=hostile), 1_000.0))
    assert "\x1b" not in said and "\n" not in said


@pytest.mark.parametrize(("seconds", "text"), [(-3, "0 s"), (59.4, "59 s"), (60, "1 min"), (7_199, "1 h 59 min")])
def test_lengths_are_rounded(seconds: float, text: str) -> None:
    assert length(seconds) == text
