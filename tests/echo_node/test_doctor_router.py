"""`echo-node doctor` says what the router does with requests for open ports."""

import subprocess
import sys

import pytest

from benchmarks.dissemination.wan import homes, routers
from benchmarks.dissemination.wan.emulator import Home
from benchmarks.dissemination.wan.homes import WanSet, open_wan
from benchmarks.dissemination.wan.routers import Router
from echo_node.config import NodeConfig
from echo_node.doctor_router import examine_router

emulated = pytest.mark.skipif(
    not homes.can_emulate() or bool(routers.lacking()), reason="routers take root, TUN devices, nftables and miniupnpd"
)
ASK = """
from echo_node.config import NodeConfig
from echo_node.doctor_router import examine_router
finding = examine_router(NodeConfig(router_ports=True))
print(finding.level, finding.what)
"""


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (NodeConfig(router_ports=False), "is not asked to open ports: router_ports is off"),
        (
            NodeConfig(router_ports=True, swarm_host="127.0.0.1"),
            "is not asked to open ports: this machine listens on 127.0.0.1 only",
        ),
    ],
)
def test_a_router_that_is_not_asked_is_a_note(config: NodeConfig, what: str) -> None:
    finding = examine_router(config)
    assert (finding.level, finding.what) == ("note", what)


@emulated
def test_routers_answer_or_do_not() -> None:
    kinds: tuple[Router, ...] = ("mapping", "cone")
    with open_wan(2, WanSet(loss=0.0, homes=(Home(up=50, down=50, delay_ms=2),) * 2, routers=kinds)) as wan:
        for host, expected in ((1, "ok has opened port "), (2, "note opens no ports: it answers neither UPnP")):
            command = [*wan.command(host), sys.executable, "-c", ASK]
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
            assert said.startswith(expected)
