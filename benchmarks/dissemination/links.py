"""Hosts on home links: network namespaces on one bridge, with both directions of each link shaped.

Host 0 is the hub, the others are the nodes. If the kernel has netem, every link also has a delay. Making namespaces
requires root and iproute2.

The names of the namespaces are unique to a run. `close` removes them; the next run removes those of a killed run.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

HUB: Final = 0
DELAY_MS: Final = 10
"""One-way delay of each host's link in milliseconds, if the kernel has netem."""
QUEUE_MS: Final = 50
"""Milliseconds of traffic that the queue of a link holds: no more than in a home router."""
UPLINK_BURST: Final = "16kb"
DOWNLINK_BURST: Final = "32kb"
CONGESTION_CONTROLS: Final = ("cubic", "reno")
"""TCP congestion controls of home computers, by preference. BBR is excluded: without delay its window (rate times least
delay) would be a few packets.
"""
HUB_DOWN_MBIT_S: Final = 1000
CONGESTION_CONTROL: Final = Path("/proc/sys/net/ipv4/tcp_congestion_control")
PREFIX: Final = "echo-bench"
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSet:
    """A named set of rates for the links of all hosts, in Mbit/s."""

    hub_up: int
    node_down: int
    node_up: int

    @property
    def columns(self) -> dict[str, float]:
        return {"hub_up_mbit_s": self.hub_up, "node_up_mbit_s": self.node_up}

    @property
    def name(self) -> str:
        return f"hub {self.hub_up}, nodes {self.node_down}/{self.node_up}"

    def bound_s(self, size_bytes: int, num_nodes: int) -> float:
        return bound_s(size_bytes, hub_up=self.hub_up, ups=[self.node_up] * num_nodes, down=self.node_down)


def bound_s(size_bytes: int, *, hub_up: float, ups: Sequence[float], down: float) -> float:
    """Return the least seconds in which any scheme brings `size_bytes` from the hub to all nodes. Rates are in Mbit/s;
    `ups` has one for each node, `down` is the slowest downlink.

    Source: Kumar and Ross, "Peer-assisted file distribution: the minimum distribution time", 2006.
    """
    megabits = size_bytes * 8 / 1e6
    return max(megabits / hub_up, megabits / down, len(ups) * megabits / (hub_up + sum(ups)))


class Links:
    """Network namespaces and their links. Make them with `open_links`."""

    def __init__(self, num_nodes: int, links: LinkSet) -> None:
        self._links = links
        self._num_hosts = num_nodes + 1
        self._name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._delayed = has_netem()

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(self, host: int) -> list[str]:
        """Return the prefix of a command that makes the command run on this host."""
        return ["ip", "netns", "exec", self._host(host)]

    def open(self) -> None:
        _ip("netns", "add", self.bridge)
        _ip("-n", self.bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.bridge, "link", "set", "bridge", "up")
        for host in range(self._num_hosts):
            self._join(host)

    def close(self) -> None:
        delete_namespaces(f"{self._name}-")

    def _join(self, host: int) -> None:
        name, port = self._host(host), f"port{host}"
        _ip("netns", "add", name)
        choose_congestion_control(name)
        _ip("link", "add", "wan", "netns", name, "type", "veth", "peer", "name", port, "netns", self.bridge)
        _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "wan")
        for device in ("lo", "wan"):
            _ip("-n", name, "link", "set", device, "up")
        _ip("-n", self.bridge, "link", "set", port, "master", "bridge", "up")
        is_hub = host == HUB
        up = self._links.hub_up if is_hub else self._links.node_up
        down = HUB_DOWN_MBIT_S if is_hub else self._links.node_down
        self._shape(name, "wan", up, UPLINK_BURST)
        self._shape(self.bridge, port, down, DOWNLINK_BURST)

    def _shape(self, namespace: str, device: str, mbit_s: int, burst: str) -> None:
        parent = ["root"]
        if self._delayed:
            _tc(namespace, device, "root", "handle", "1:", "netem", "delay", f"{DELAY_MS}ms", "limit", "10000")
            parent = ["parent", "1:1"]
        queue = ("burst", burst, "latency", f"{QUEUE_MS}ms")
        _tc(namespace, device, *parent, "handle", "10:", "tbf", "rate", f"{mbit_s}mbit", *queue)

    @property
    def bridge(self) -> str:
        return f"{self._name}-bridge"

    def _host(self, host: int) -> str:
        return f"{self._name}-{host}"


@contextmanager
def open_links(num_nodes: int, links: LinkSet) -> Iterator[Links]:
    """Make network namespaces for a hub and its nodes, with shaped links, during the block."""
    shaped = Links(num_nodes, links)
    try:
        shaped.open()
        yield shaped
    finally:
        shaped.close()


def conditions() -> str:
    delay = f"netem, {DELAY_MS} ms one way on each" if has_netem() else "no delay: the kernel has no netem"
    shaped = "network namespaces on a bridge, veth links shaped by tbf in both directions"
    return f"{shaped}, queues of {QUEUE_MS} ms; {delay}; TCP with {congestion_control()}"


def lacking() -> str:
    """Return why this process may not make shaped links; "" if it may."""
    return "" if can_shape() else "links that can be shaped: root's rights, and iproute2"


def can_shape() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "bridge")))


def has_netem() -> bool:
    """Return True if netem works on the loopback interface of a new namespace."""
    with _probe() as namespace:
        try:
            _tc(namespace, "lo", "root", "netem", "delay", "1ms")
        except RuntimeError:
            return False
    return True


@contextmanager
def _probe() -> Iterator[str]:
    """Make a temporary network namespace, in which the caller tests whether the kernel has a feature."""
    namespace = f"{PREFIX}-{os.getpid()}-{next(_numbers)}-probe"
    _ip("netns", "add", namespace)
    try:
        yield namespace
    finally:
        _ip("netns", "delete", namespace)


def congestion_control() -> str:
    with _probe() as namespace:
        return choose_congestion_control(namespace) or "the congestion control of this machine"


def choose_congestion_control(namespace: str) -> str | None:
    """Set the TCP congestion control of a namespace: the first of `CONGESTION_CONTROLS` that the kernel has. Return its
    name, None if none can be set.
    """
    for control in CONGESTION_CONTROLS:
        try:
            _ip("netns", "exec", namespace, "sh", "-c", f"echo {control} > {CONGESTION_CONTROL}")
        except RuntimeError:
            continue
        return control
    return None


def remove_leftovers() -> None:
    """Delete the namespaces of benchmarks whose process has ended."""
    for name in _namespaces():
        found = re.match(rf"{PREFIX}-(\d+)-", name)
        if found and not psutil.pid_exists(int(found[1])):
            _ip("netns", "delete", name)


def delete_namespaces(prefix: str) -> None:
    for name in _namespaces():
        if name.startswith(prefix):
            _ip("netns", "delete", name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in run_command("ip", "netns", "list").splitlines() if line.strip()]


def _ip(*arguments: str) -> None:
    run_command("ip", *arguments)


def _tc(namespace: str, device: str, *arguments: str) -> None:
    run_command("tc", "-n", namespace, "qdisc", "add", "dev", device, *arguments)


def run_command(*command: str) -> str:
    """Run a command; return its output. Raises RuntimeError with its error output."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
