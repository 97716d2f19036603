"""The lower bound on dissemination time equals values computed by hand. If this process may create links with limited
rates, it removes them completely.
"""

import subprocess

import psutil
import pytest

from benchmarks.dissemination import links
from benchmarks.dissemination.links import LinkSet, open_links, remove_leftovers, run_command

shaped = pytest.mark.skipif(not links.can_shape(), reason="namespaces with shaped links take root and iproute2")
SET = LinkSet(hub_up=20, node_down=100, node_up=40)


@pytest.mark.parametrize(
    ("hub_up", "node_up", "megabytes", "num_nodes", "bound_s"),
    [
        (20, 20, 64, 8, 25.6),  # The hub's uplink is the bottleneck: it must send one copy.
        (1000, 40, 8, 1, 0.64),  # Each node's downlink is the bottleneck.
        # All uplinks together are the bottleneck: they carry one copy per node.
        (100, 20, 64, 8, 8 * 64 * 8 / (100 + 8 * 20)),
    ],
)
def test_the_bound(hub_up: int, node_up: int, megabytes: int, num_nodes: int, bound_s: float) -> None:
    of = LinkSet(hub_up=hub_up, node_down=100, node_up=node_up)
    assert of.bound_s(megabytes * 10**6, num_nodes) == pytest.approx(bound_s)


def of_ours() -> list[str]:
    return [line for line in run_command("ip", "netns", "list").splitlines() if line.startswith("echo-bench-")]


@shaped
def test_nothing_is_left_behind() -> None:
    before = of_ours()
    with pytest.raises(KeyboardInterrupt), open_links(2, SET):
        assert len(of_ours()) > len(before)
        raise KeyboardInterrupt
    assert of_ours() == before


@shaped
def test_leftovers_of_a_killed_run_are_removed() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert not psutil.pid_exists(child.pid)
    left = f"echo-bench-{child.pid}-0-bridge"
    run_command("ip", "netns", "add", left)
    remove_leftovers()
    assert left not in run_command("ip", "netns", "list")
