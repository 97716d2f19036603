from __future__ import annotations

import re

import pytest

from echo_hub.net import penalties
from echo_hub.net.penalties import FORGOTTEN_AFTER_S, LONGEST_OF_ADDRESS_S, LONGEST_S, Penalties
from echo_shared.errors import RefusedError
from echo_shared.wire.messages import RefusalCode

HERE, THERE = "192.0.2.1", "192.0.2.2"


def wait_s(book: Penalties, place: str, node_id: str, now: float) -> int:
    """Return the seconds until the node may connect; 0: it may connect now."""
    try:
        book.check(place, node_id, now=now)
    except RefusedError as error:
        assert error.code == RefusalCode.TOO_SOON and error.do
        found = re.match(r"(\d+) s", error.got or "")
        assert found is not None
        return int(found[1])
    return 0


def test_each_fault_doubles_the_wait() -> None:
    book, waits = Penalties(), []
    for _ in range(12):
        book.fault(HERE, "bad", now=100.0)
        waits.append(wait_s(book, THERE, "bad", 100.0))
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, int(LONGEST_S), int(LONGEST_S)]
    assert wait_s(book, HERE, "another", 100.0) == LONGEST_OF_ADDRESS_S, (
        "a new key costs nothing, so its address is delayed"
    )
    assert wait_s(book, THERE, "another", 100.0) == 0
    assert wait_s(book, HERE, "another", 100.0 + LONGEST_OF_ADDRESS_S) == 0
    assert wait_s(book, HERE, "bad", 100.0 + LONGEST_S) == 0
    book.fault(HERE, "bad", now=100.0 + FORGOTTEN_AFTER_S)
    assert wait_s(book, HERE, "bad", 100.0 + FORGOTTEN_AFTER_S) == 1


def test_a_proven_node_is_not_delayed_by_others_of_its_address() -> None:
    book = Penalties()
    book.behaved("good")
    book.fault(HERE, "bad", now=0.0)
    assert (wait_s(book, HERE, "good", 0.0), wait_s(book, HERE, "new", 0.0)) == (0, 1)
    book.fault(THERE, "good", now=0.0)
    book.behaved("good")
    assert wait_s(book, HERE, "good", 0.0) == 1, "its own fault still delays it"


@pytest.mark.parametrize("place", ["127.0.0.1", "::1"])
def test_loopback_is_everybodys(place: str) -> None:
    book = Penalties()
    book.fault(place, "bad", now=0.0)
    assert (wait_s(book, place, "bad", 0.0), wait_s(book, place, "other", 0.0)) == (1, 0)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "MOST_KNOWN", 3)
    monkeypatch.setattr(penalties, "MOST_TRUSTED", 2)
    book = Penalties()
    for number in range(10):
        book.fault(f"192.0.2.{number}", f"bad{number}", now=0.0)
        book.behaved(f"good{number}")
    assert (len(book._nodes), len(book._places), len(book._trusted)) == (3, 3, 2)
    assert wait_s(book, "", "bad9", 0.0) == 1 and wait_s(book, "", "bad0", 0.0) == 0
