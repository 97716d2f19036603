"""Nodes behind home routers connect to each other: a real hub, real nodes, emulated lines, and routers made with
nftables.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.dissemination.fleet import open_fleet
from benchmarks.dissemination.wan import homes
from benchmarks.dissemination.wan.emulator import Home
from benchmarks.dissemination.wan.homes import WanSet
from benchmarks.dissemination.wan.routers import Router
from echo_node.net.hole_punching import ANSWER_S, CONNECT_S

LINK_S = 30.0
"""Maximum seconds until the nodes are linked. An idle machine needs 2 s."""
QUICK = Home(up=50, down=50, delay_ms=15)


def behind(*kinds: Router) -> WanSet:
    links = WanSet(loss=0.0, homes=(QUICK,) * len(kinds), routers=kinds)
    if lacks := homes.lacking(links):
        pytest.skip(lacks)
    return links


@pytest.mark.parametrize("kinds", [("cone", "cone"), ("dual", "ipv6")], ids=["IPv4", "IPv6"])
async def test_routers_that_keep_ports_are_passed(kinds: tuple[Router, Router], tmp_path: Path) -> None:
    async with open_fleet(behind(*kinds), 2, tmp_path) as fleet:
        url = await fleet.hub.ask("open_echo", side="echo", way="auto")
        await fleet.of_nodes("join", side="echo", url=url)
        linked = await fleet.hub.ask("linked", side="echo", num_nodes=2, within_s=LINK_S)
    assert linked["linked_share"] == 1.0
    logs = [(tmp_path / f"node{number}.log").read_text() for number in (1, 2)]
    assert ["Linked with the node" in log for log in logs] == [True, True]


async def test_other_routers_are_given_up_without_a_complaint(tmp_path: Path) -> None:
    async with open_fleet(behind("symmetric", "symmetric"), 2, tmp_path) as fleet:
        url = await fleet.hub.ask("open_echo", side="echo", way="auto")
        await fleet.of_nodes("join", side="echo", url=url)
        linked = await fleet.hub.ask("linked", side="echo", num_nodes=2, within_s=ANSWER_S + 2 * CONNECT_S)
        assert linked["linked_share"] == 0.0
    for name in ("hub", "node1", "node2"):
        log = (tmp_path / f"{name}.log").read_text()
        assert "Traceback" not in log and "exception" not in log
