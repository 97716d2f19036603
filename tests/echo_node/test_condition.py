from dataclasses import replace
from typing import Any, get_args

import pytest

from echo_node.condition import State, described
from tests.echo_node.test_panel import SNAPSHOT

QUIET = replace(SNAPSHOT, fetching={}, problems={})


@pytest.mark.parametrize(
    ("changes", "state", "says"),
    [
        ({}, "sampling", "Drawing 3 rollouts with policy version 12."),
        ({"run_name": "", "connected": False}, "connecting", "http://127.0.0.1:8710"),
        ({"connected": False}, "not connected", "retries by itself"),
        ({"activity": "preparing"}, "preparing", "engine starts"),
        ({"activity": "preparing", "policy_version": None, "fetching": {"The base model": (1, 2)}}, "fetching", "50 %"),
        ({"activity": "fetching", "fetching": {"Policy version 13": (1, 4)}}, "fetching", "Policy version 13"),
        ({"activity": "preparing", "stage": "The engine is measured."}, "preparing", "The engine is measured."),
        (
            {"activity": "preparing", "stage": "It starts.", "preparing": {"The base model, converted": (1, 4)}},
            "preparing",
            "The base model, converted: 0.0 of 0.0 MB (25 %).",
        ),
        ({"activity": "waiting"}, "waiting", "Ready"),
        ({"activity": "waiting", "standby": "Standing by: it is too slow."}, "standby", "it is too slow"),
        ({"activity": "paused", "holds": {"on_battery": "A.", "cpu_hot": "B."}}, "paused", "A. B."),
        (
            {"activity": "paused", "devices": ({"holds": {"paused": "C."}}, {"holds": {"gpu_hot": "D."}})},
            "paused",
            "C. D.",
        ),
        ({"activity": "draining", "holds": {"on_battery": "A."}}, "finishing", "returns its leases"),
    ],
)
def test_the_most_important_state_is_shown(changes: dict[str, Any], state: str, says: str) -> None:
    shown = described(replace(QUIET, **changes), is_finishing=False)
    assert shown.state == state and says in shown.reason
    assert shown.state in get_args(State)


def test_a_node_that_finishes_says_so_even_if_it_is_paused() -> None:
    shown = described(replace(QUIET, holds={"paused": "Paused."}), is_finishing=True)
    assert (shown.state, "3 rollouts" in shown.reason) == ("finishing", True)
