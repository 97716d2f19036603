"""Which addresses this machine has on its networks."""

from __future__ import annotations

import socket

import psutil


def own_addresses() -> frozenset[str]:
    """Of all interfaces, loopback's too; blocks for a fraction of a millisecond."""
    return frozenset(
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    )
