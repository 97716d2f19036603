"""A hub and eight unequal homes on an emulated wide-area network. Each has its own namespace, and `emulator` connects
them. A home may have a router (`routers`), in a second namespace.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from ipaddress import IPv4Interface, IPv6Interface
from pathlib import Path
from typing import Any, Final

from benchmarks.dissemination.links import HUB as HUB_HOST
from benchmarks.dissemination.links import (
    PREFIX,
    LinkSet,
    bound_s,
    can_shape,
    choose_congestion_control,
    delete_namespaces,
    run_command,
)
from benchmarks.dissemination.wan import routers
from benchmarks.dissemination.wan.emulator import TUN, Home, Weather
from benchmarks.dissemination.wan.routers import HAS_IPV4, HAS_IPV6, HomeRouter, Place, Router

HUB: Final = Home(up=100, down=1000, delay_ms=5)
HOMES: Final = (
    Home(up=8, down=40, delay_ms=45),
    Home(up=8, down=50, delay_ms=30),
    Home(up=10, down=50, delay_ms=35),
    Home(up=10, down=100, delay_ms=20),
    Home(up=10, down=100, delay_ms=15),
    Home(up=10, down=50, delay_ms=25),
    Home(up=12, down=80, delay_ms=12),
    Home(up=45, down=250, delay_ms=8),
)
JITTER_MS: Final = 2.0
UP_QUEUE_MS: Final = 100.0
DOWN_QUEUE_MS: Final = 60.0
ENDS_WITHIN_S: Final = 5.0
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class WanSet:
    """Homes of an emulated network. `loss` is the share of lost packets. `routers` lists kinds of routers; home after
    home gets the next kind, from the beginning again after the last.
    """

    loss: float
    seed: int = 0
    hub: Home = HUB
    homes: tuple[Home, ...] = HOMES
    routers: tuple[Router, ...] = ("open",)

    @property
    def name(self) -> str:
        return f"homes, {self.loss:.1%} lost"

    @property
    def behind(self) -> str:
        """The kinds of the homes' routers in words; empty if no home has a router."""
        return "" if self.routers == ("open",) else f"behind {' and '.join(dict.fromkeys(self.routers))}"

    def router(self, host: int) -> Router:
        """Return the kind of router in front of this host; "open" (no router) for the hub."""
        return "open" if host == HUB_HOST else self.routers[(host - 1) % len(self.routers)]

    @property
    def hub_up(self) -> float:
        return self.hub.up

    @property
    def columns(self) -> dict[str, Any]:
        node_up = sum(home.up for home in self.homes) / len(self.homes)
        columns = {"hub_up_mbit_s": self.hub_up, "node_up_mbit_s": node_up, "loss": self.loss}
        return {**columns, "behind": self.behind} if self.behind else columns

    def bound_s(self, size_bytes: int, num_nodes: int) -> float:
        homes = self.homes[:num_nodes]
        ups, down = [home.up for home in homes], min(home.down for home in homes)
        return bound_s(size_bytes, hub_up=self.hub.up, ups=ups, down=down)


class Wan:
    """An emulated network. Host 0 is the hub, the others are homes. Make it with `open_wan`."""

    def __init__(self, num_nodes: int, links: WanSet) -> None:
        self._name = f"{PREFIX}-{os.getpid()}-wan{next(_numbers)}"
        self._links = links
        self._hosts = (links.hub, *links.homes[:num_nodes])
        self._emulator: subprocess.Popen[str] | None = None
        self._routers = {
            host: HomeRouter(
                links.router(host), name=self.line(host), computer=self._namespace(host), place=self._place(host)
            )
            for host in range(len(self._hosts))
            if links.router(host) != "open"
        }

    def address(self, host: int) -> str:
        """Return the address at which a program of this host listens. If all homes have IPv6, this is an IPv6
        address.
        """
        if all(kind in HAS_IPV6 for kind in self._links.routers):
            return str(self._place(host).ipv6.ip)
        return str(routers.COMPUTER.ip if host in self._routers else self._place(host).line.ip)

    def outside(self, host: int, family: socket.AddressFamily) -> str:
        """Return the address at which other homes reach this host."""
        place = self._place(host)
        return str((place.ipv6 if family is socket.AF_INET6 else place.line).ip)

    def command(self, host: int) -> list[str]:
        """Return the prefix of a command that makes the command run on this host."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def line(self, host: int) -> str:
        """Return the namespace at the host's end of the line: the namespace of its router, or the host's own namespace
        without a router.
        """
        own = self._namespace(host)
        return own if self._links.router(host) == "open" else f"{own}-router"

    def open(self) -> None:
        """Open the network; return once the hosts reach each other. Raises RuntimeError."""
        for host in range(len(self._hosts)):
            for namespace in dict.fromkeys((self._namespace(host), self.line(host))):
                run_command("ip", "netns", "add", namespace)
                choose_congestion_control(namespace)
                run_command("ip", "-n", namespace, "link", "set", "lo", "up")
        for router in self._routers.values():
            router.open()
        self._open_emulator()
        for host in range(len(self._hosts)):
            self._connect(host)
        for router in self._routers.values():
            router.begin()

    def _open_emulator(self) -> None:
        self._emulator = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.dissemination.wan.emulator"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        homes = [
            {**asdict(home), "namespace": self.line(host), "networks": self._networks(host)}
            for host, home in enumerate(self._hosts)
        ]
        weather = Weather(
            loss=self._links.loss, jitter_ms=JITTER_MS, up_queue_ms=UP_QUEUE_MS, down_queue_ms=DOWN_QUEUE_MS
        )
        said = self._ask(json.dumps({"homes": homes, "weather": asdict(weather), "seed": self._links.seed}))
        if said != "ready\n":
            raise RuntimeError(f"the emulated network did not open: {said or 'see what it says above'}")

    def _connect(self, host: int) -> None:
        """Add addresses and routes to the host's end of the line."""
        namespace, place = self.line(host), self._place(host)
        has_router = host in self._routers
        if self._has(host, HAS_IPV4):
            routers.add_address(namespace, routers.WAN, place.line)
        if self._has(host, HAS_IPV6):
            if not has_router:
                routers.add_address(namespace, routers.WAN, place.ipv6)
            run_command("ip", "-6", "-n", namespace, "route", "add", "default", "dev", routers.WAN)

    def _has(self, host: int, kinds: frozenset[Router]) -> bool:
        return host == HUB_HOST or self._links.router(host) in kinds

    def _networks(self, host: int) -> list[str]:
        """Return the networks whose packets this host's line carries."""
        place = self._place(host)
        return [
            *([str(place.line.ip)] if self._has(host, HAS_IPV4) else []),
            *([str(place.ipv6.network)] if self._has(host, HAS_IPV6) else []),
        ]

    @staticmethod
    def _place(host: int) -> Place:
        return Place(line=IPv4Interface(f"11.78.0.{host + 1}/24"), ipv6=IPv6Interface(f"2600:78:0:{host + 1:x}::2/64"))

    def carried(self) -> dict[str, Any]:
        """Return the counts since the last call: packets `sent`, `lost` and dropped from a `full` queue, and the
        emulator's share of a core. Raises RuntimeError.
        """
        if not (said := self._ask("")):
            raise RuntimeError("the emulated network has ended: see what it says above")
        return {"sent": 0, "lost": 0, "full": 0, **json.loads(said)}

    def close(self) -> None:
        for router in self._routers.values():
            router.close()
        if self._emulator is not None:
            assert self._emulator.stdin is not None and self._emulator.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # The emulator has already ended.
                self._emulator.stdin.close()
            try:
                self._emulator.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._emulator.kill()
                self._emulator.wait()
            self._emulator.stdout.close()
        delete_namespaces(f"{self._name}-")

    def _ask(self, line: str) -> str:
        """Send a line; return the answer, or "" if the emulator has ended."""
        assert self._emulator is not None
        assert self._emulator.stdin is not None and self._emulator.stdout is not None
        try:
            self._emulator.stdin.write(line + "\n")
            self._emulator.stdin.flush()
        except BrokenPipeError:
            return ""
        return self._emulator.stdout.readline()

    def _namespace(self, host: int) -> str:
        return f"{self._name}-{host}"


@contextmanager
def open_wan(num_nodes: int, links: WanSet) -> Iterator[Wan]:
    """Open an emulated network during the block."""
    wan = Wan(num_nodes, links)
    try:
        wan.open()
        yield wan
    finally:
        wan.close()


def lacking(links: LinkSet | WanSet) -> str:
    """Return what this process lacks to open a network with these links; "" if nothing."""
    if not can_emulate():
        return "an emulated network: root's rights, iproute2, and TUN devices"
    return routers.lacking() if isinstance(links, WanSet) and links.behind else ""


def can_emulate() -> bool:
    return can_shape() and os.access(Path(TUN), os.R_OK | os.W_OK)
