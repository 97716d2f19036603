from __future__ import annotations

from dataclasses import replace
from typing import Any

from echo_hub.actions.requests import TABLE
from echo_hub.core.trust.standing import StandingState
from echo_hub.dashboard.actions import BUTTONS, buttons


async def test_every_node_has_the_buttons_that_are_for_it(source: Any) -> None:
    for node in await source.nodes():
        actions = [button.action for button in buttons(node) if button.action != "pardon"]
        assert actions == ["unban" if node.banned else "ban"]
    assert len({button.action for button in BUTTONS} & TABLE.keys()) == len(BUTTONS)


async def test_who_is_quarantined_may_be_pardoned(source: Any) -> None:
    node = (await source.nodes())[0]
    stands = [replace(node, totals=replace(node.totals, standing=state)) for state in ("", *StandingState)]
    offered = [one.totals.standing for one in stands if "pardon" in [button.action for button in buttons(one)]]
    assert offered == [StandingState.QUARANTINED]
