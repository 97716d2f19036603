"""This machine's interfaces: their addresses and networks."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection

import psutil

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


def own_interfaces() -> tuple[Interface, ...]:
    """Return the address of each interface, with its network. Addresses without a netmask are left out. Blocks the
    calling thread for a fraction of a millisecond.
    """
    found: list[Interface] = []
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.netmask and one.family == socket.AF_INET:
                found.append(ipaddress.IPv4Interface(f"{one.address}/{one.netmask}"))
            elif one.netmask and one.family == socket.AF_INET6:
                bits = int(ipaddress.IPv6Address(one.netmask)).bit_count()
                found.append(ipaddress.IPv6Interface(f"{one.address.partition('%')[0]}/{bits}"))
    return tuple(found)


def is_neighbour(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
    interfaces: Collection[Interface],
    local_hosts: Collection[str],
) -> bool:
    """Return True if `address` is another machine in the network of an interface with one of the `local_hosts`.

    The first and the last address of a network are excluded, because most routers use one of these addresses.
    """
    if any(address == interface.ip for interface in interfaces):
        return False
    for interface in interfaces:
        network = interface.network
        if str(interface.ip) in local_hosts and address in network:
            return 1 < int(address) - int(network.network_address) < network.num_addresses - 2
    return False
