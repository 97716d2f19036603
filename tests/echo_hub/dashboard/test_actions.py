from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echo_hub.actions.requests import TABLE
from echo_hub.core.trust.standing import StandingState
from echo_hub.dashboard.actions import BUTTONS, buttons


async def test_every_node_has_the_buttons_for_its_state(source: Any) -> None:
    for node in await source.nodes():
        ban = [button.action for button in buttons(node) if button.action in ("ban", "unban")]
        assert ban == ["unban" if node.banned else "ban"]
    assert len({button.action for button in BUTTONS} & TABLE.keys()) == len(BUTTONS)


@pytest.mark.parametrize(
    ("action", "states"),
    [
        ("pardon", [StandingState.QUARANTINED]),
        ("trust", [StandingState.NEW, StandingState.SUSPECT]),
        ("distrust", [StandingState.PROVEN]),
    ],
)
async def test_possible_actions_follow_from_a_nodes_standing(
    source: Any, action: str, states: list[StandingState]
) -> None:
    node = (await source.nodes())[0]
    stands = [replace(node, totals=replace(node.totals, standing=state)) for state in ("", *StandingState)]
    offered = [one.totals.standing for one in stands if action in [button.action for button in buttons(one)]]
    assert set(offered) == set(states)
