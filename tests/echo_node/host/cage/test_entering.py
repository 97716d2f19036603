"""A system that offers no cage (sandbox for engines) is reported as such."""

import pytest

from echo_node.host.cage.description import Cage, Held
from echo_node.host.cage.entering import enter


def test_an_unknown_system_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "freebsd14")
    assert enter(Cage()) == Held.to_nothing("Echo has no cage for freebsd14")
