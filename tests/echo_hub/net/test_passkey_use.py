"""A node has few addresses, which may change now and then. A passkey used from many addresses was shared, so further
addresses are refused.
"""

from __future__ import annotations

import pytest

from echo_hub.net import passkey_use
from echo_hub.net.passkey_use import FORGOTTEN_AFTER_S, MOST_PLACES, PasskeyUse


def test_a_node_has_a_few_addresses_and_keeps_them() -> None:
    use = PasskeyUse()
    assert all(use.may_use("a", f"203.0.113.{number}", now=0.0) for number in range(MOST_PLACES))
    assert not use.may_use("a", "203.0.113.99", now=1.0)
    assert use.may_use("a", "203.0.113.0", now=2.0) and use.may_use("b", "203.0.113.99", now=2.0)
    assert all(use.may_use("c", f"2001:db8::{number:x}", now=0.0) for number in range(100)), "all of one network"


def test_addresses_that_are_not_used_any_more_make_room() -> None:
    use = PasskeyUse()
    for number in range(MOST_PLACES):
        use.may_use("a", f"203.0.113.{number}", now=0.0)
    use.may_use("a", "203.0.113.1", now=10.0)
    later = FORGOTTEN_AFTER_S + 1
    assert all(use.may_use("a", f"198.51.100.{number}", now=later) for number in range(MOST_PLACES - 1))
    assert not use.may_use("a", "198.51.100.99", now=later) and use.may_use("a", "203.0.113.1", now=later)


def test_of_too_many_nodes_the_first_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passkey_use, "MOST_NODES", 2)
    use = PasskeyUse()
    for node_id in "abc":
        use.may_use(node_id, "203.0.113.1", now=0.0)
    assert use._seen.keys() == {"b", "c"}
