from __future__ import annotations

import pytest

from echo_hub.dashboard.access import attempts
from echo_hub.dashboard.access.attempts import BURST, EVERY_S, Attempts


def test_attempts_are_allowed_in_a_burst_and_then_rarely() -> None:
    tried = Attempts()
    assert [tried.wait_s("192.0.2.1", 0.0) for _ in range(BURST)] == [0.0] * BURST
    assert tried.wait_s("192.0.2.1", 0.0) == tried.wait_s("192.0.2.1", 0.0) == EVERY_S, "refused attempts do not count"
    assert tried.wait_s("192.0.2.2", 0.0) == 0.0
    assert [tried.wait_s("192.0.2.1", EVERY_S) for _ in range(2)] == [0.0, EVERY_S]
    tried.forget("192.0.2.1")
    assert tried.wait_s("192.0.2.1", EVERY_S) == 0.0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MOST_PLACES", 3)
    tried = Attempts()
    for number in range(10):
        tried.wait_s(f"192.0.2.{number}", 0.0)
    assert len(tried._free_at) == 3
