"""Routers of emulated homes. A router connects a home's computer with its line, in a separate namespace.

    computer 192.168.1.2 - lan [router: nftables] wan - line - other homes

Like a home router, it passes all outgoing packets, but only answers to them come in.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface
from pathlib import Path
from shutil import which
from typing import Final, Literal

from benchmarks.dissemination.links import run_command

Router = Literal["open", "cone", "symmetric", "mapping", "ipv6", "dual"]
"""Kinds of home:

- open: no router; everybody can connect to the computer.
- cone: each port of the computer maps to the router's port of the same number, for all peers.
- symmetric: each port of the computer maps to a different random port of the router for each peer.
- mapping: as cone, but the computer may ask for an open port by UPnP, NAT-PMP or PCP.
- ipv6: IPv6 only, without address translation.
- dual: IPv4 as in cone; IPv6 without address translation.
"""
HAS_IPV4: Final = frozenset[Router]({"open", "cone", "symmetric", "mapping", "dual"})
HAS_IPV6: Final = frozenset[Router]({"ipv6", "dual"})
LAN: Final = "lan"
WAN: Final = "wan"
COMPUTER: Final = IPv4Interface("192.168.1.2/24")
"""Private address of the computer in its home. All homes use the same address, as real homes do."""
GATEWAY: Final = IPv4Interface("192.168.1.1/24")
_RULES: Final = """
table inet filter {{
  chain miniupnpd {{
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
    iifname {{ "lo", "{lan}" }} accept
    ct state established,related accept
    meta l4proto ipv6-icmp accept
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    iifname "{lan}" accept
    ct state established,related accept
    jump miniupnpd
  }}
  chain prerouting_miniupnpd {{
  }}
  chain prerouting {{
    type nat hook prerouting priority dstnat; policy accept;
    jump prerouting_miniupnpd
  }}
  chain postrouting_miniupnpd {{
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    jump postrouting_miniupnpd
    meta nfproto ipv4 oifname "{wan}" masquerade {how}
  }}
}}
"""
_MAPPING: Final = """
ext_ifname={wan}
listening_ip={lan}
enable_natpmp=yes
enable_upnp=yes
secure_mode=yes
ipv6_disable=yes
notify_interval=60
upnp_table_name=filter
upnp_nat_table_name=filter
uuid=6d0cdbd1-39a6-4d5c-b1b9-9d2f5e3a7a11
"""
DAEMON: Final = "miniupnpd"
ENDS_WITHIN_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Addresses of one home in the emulated network: those of its line, and the IPv6 address of its computer."""

    line: IPv4Interface
    ipv6: IPv6Interface


class HomeRouter:
    """The router of one home, whose computer is the namespace `computer`. The namespace `name` must exist."""

    def __init__(self, kind: Router, *, name: str, computer: str, place: Place) -> None:
        self._kind = kind
        self._name = name
        self._computer = computer
        self._place = place
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._daemon: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Connect the computer with the router. When the router's line is connected too, call `begin`. Raises
        RuntimeError.
        """
        _set(self._computer, "net.ipv6.conf.default.accept_dad", 0)
        _set(self._name, "net.ipv6.conf.default.accept_dad", 0)
        run_command(
            *("ip", "link", "add", WAN, "netns", self._computer, "type", "veth"),
            *("peer", "name", LAN, "netns", self._name),
        )
        for namespace, device in ((self._computer, WAN), (self._name, LAN), (self._name, "lo")):
            run_command("ip", "-n", namespace, "link", "set", device, "up")
        if self._kind in HAS_IPV4:
            _set(self._name, "net.ipv4.ip_forward", 1)
            add_address(self._computer, WAN, COMPUTER)
            add_address(self._name, LAN, GATEWAY)
            _add_route(self._computer, GATEWAY)
        if self._kind in HAS_IPV6:
            _set(self._name, "net.ipv6.conf.all.forwarding", 1)
            gateway = IPv6Interface((self._place.ipv6.network[1], 64))
            add_address(self._computer, WAN, self._place.ipv6)
            add_address(self._name, LAN, gateway)
            _add_route(self._computer, gateway)
        how = "random,fully-random" if self._kind == "symmetric" else ""
        run_command(
            *("ip", "netns", "exec", self._name, "nft", _RULES.format(lan=LAN, wan=WAN, how=how)),
        )

    def begin(self) -> None:
        """If this kind of router opens ports on request, start the service for these requests."""
        if self._kind == "mapping":
            self._directory = tempfile.TemporaryDirectory(prefix="echo-router-")
            settings = Path(self._directory.name, "settings")
            settings.write_text(_MAPPING.format(lan=LAN, wan=WAN))
            self._daemon = subprocess.Popen(
                ["ip", "netns", "exec", self._name, DAEMON, "-d", "-f", str(settings), "-P", f"{settings}.pid"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def close(self) -> None:
        if self._daemon is not None:
            self._daemon.terminate()
            try:
                self._daemon.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
        if self._directory is not None:
            self._directory.cleanup()


def add_address(namespace: str, device: str, address: IPv4Interface | IPv6Interface) -> None:
    run_command("ip", "-n", namespace, "address", "add", str(address), "dev", device)


def _add_route(namespace: str, gateway: IPv4Interface | IPv6Interface) -> None:
    run_command("ip", "-n", namespace, "route", "add", "default", "via", str(gateway.ip))


def _set(namespace: str, name: str, value: int) -> None:
    run_command("ip", "netns", "exec", namespace, "sysctl", "-qw", f"{name}={value}")


def lacking() -> str:
    """Return the programs that routers need and this machine lacks; "" if it has all."""
    return ", ".join(program for program in ("nft", DAEMON) if which(program) is None)
