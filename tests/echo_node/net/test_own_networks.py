"""A node distinguishes private addresses in this machine's network from all others."""

from __future__ import annotations

from ipaddress import ip_address, ip_interface

import pytest

from echo_node.net.own_networks import is_neighbour, own_interfaces

INTERFACES = [
    ip_interface(text) for text in ("127.0.0.1/8", "192.168.1.5/24", "172.17.0.1/16", "10.0.0.1/31", "fd00::5/64")
]
LOCAL_HOSTS = ("192.168.1.5", "10.0.0.1", "fd00::5")


@pytest.mark.parametrize("host", ["192.168.1.2", "192.168.1.253", "fd00::7"])
def test_other_machines_in_the_network_are_neighbours(host: str) -> None:
    assert is_neighbour(ip_address(host), INTERFACES, LOCAL_HOSTS)


@pytest.mark.parametrize(
    "host",
    [
        *("192.168.1.5", "172.17.0.1", "fd00::5"),  # Own addresses.
        *("192.168.1.1", "192.168.1.254", "fd00::1"),  # Probably routers.
        *("192.168.1.0", "192.168.1.255", "fd00::", "10.0.0.0"),
        *("192.168.2.2", "10.0.0.7", "fd01::7", "::ffff:192.168.1.2"),  # Other networks.
        "172.17.0.2",  # An address in a container network, which does not lead to the hub.
    ],
)
def test_other_addresses_are_not(host: str) -> None:
    assert not is_neighbour(ip_address(host), INTERFACES, LOCAL_HOSTS)


def test_the_loopback_interface_of_this_machine_is_found() -> None:
    assert ip_interface("127.0.0.1/8") in own_interfaces()
