from __future__ import annotations

import pytest

from echo_hub.net.client_address import origin_of


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1", ""),
        ("::1", ""),
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a name", "a name"),
    ],
)
def test_an_origin_is_an_ipv4_address_or_a_customers_ipv6_prefix(host: str, origin: str) -> None:
    assert origin_of(host) == origin
