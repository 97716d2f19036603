from __future__ import annotations

import pytest

from echo_shared.wire.sockets import is_loopback


@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("", False)],
)
def test_loopback_is_this_machine_by_any_of_its_addresses(host: str, here: bool) -> None:
    assert is_loopback(host) is here
