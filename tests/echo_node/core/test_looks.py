from typing import Any, get_args

import pytest

from echo_node.condition import State
from echo_node.core.looks import COLOURS, NOT_RUNNING, START, TOOLTIP, look_of


def status(**changes: Any) -> dict[str, Any]:
    return {"state": "sampling", "reason": "Drawing 3 rollouts.", "holds": {}, **changes}


def test_every_state_has_a_colour() -> None:
    assert set(COLOURS) == {*get_args(State), NOT_RUNNING}


def test_a_nodes_status_is_shown() -> None:
    look = look_of(status())
    assert look.title == "Echo: sampling. Drawing 3 rollouts."
    assert (look.is_running, look.is_paused, look.has_bars) == (True, False, False)


@pytest.mark.parametrize(("hold", "by_owner"), [("paused", True), ("on_battery", False)])
def test_a_held_node_has_bars_and_offers_resume_if_paused_by_its_owner(hold: str, by_owner: bool) -> None:
    look = look_of(status(state="paused", holds={hold: "Why."}))
    assert look.has_bars and look.is_paused is by_owner


def test_without_a_running_node_the_look_gives_the_reason_or_the_way_to_start_one() -> None:
    assert (look_of(None).reason, look_of(None).is_running) == (START, False)
    assert look_of(None, "The hub has banned this node").title == "Echo: not running. The hub has banned this node"


def test_tooltips_are_short() -> None:
    assert len(look_of(status(reason="x" * 500)).title) == TOOLTIP
