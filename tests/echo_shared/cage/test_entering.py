"""If a system offers no cage (sandbox for engines), the result of `enter` says so."""

import pytest

from echo_shared.cage.description import Cage, Held
from echo_shared.cage.entering import enter


def test_an_unknown_system_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "freebsd14")
    assert enter(Cage()) == Held.to_nothing("Echo has no cage for freebsd14")
