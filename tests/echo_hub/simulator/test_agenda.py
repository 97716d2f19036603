"""Entries of the simulator's agenda happen in order of time; entries of equal time in the order in which they were
made.
"""

from __future__ import annotations

from math import inf

from echo_hub.simulator.agenda import Agenda


def test_order_is_by_moment_and_then_by_entry() -> None:
    agenda, done = Agenda(), list[tuple[float, str]]()

    def note(word: str) -> None:
        done.append((agenda.now, word))

    for moment, word in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        agenda.at(moment, note, word)
    while agenda.next_at < inf:
        agenda.advance()
    assert done == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]


def test_an_entry_may_add_further_entries() -> None:
    agenda, moments = Agenda(), list[float]()

    def again(times: int) -> None:
        moments.append(agenda.now)
        if times:
            agenda.at(agenda.now, again, times - 1)

    agenda.at(0.5, again, 2)
    while agenda.next_at < inf:
        agenda.advance()
    assert moments == [0.5, 0.5, 0.5]
