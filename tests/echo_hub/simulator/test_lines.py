"""Parcels on a simulated network line queue behind each other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from echo_hub.simulator.agenda import Agenda
from echo_hub.simulator.lines import Downlink, SimulatedUplink


@dataclass
class Parcel:
    agenda: Agenda
    log: list[tuple[float, float]]
    useful: bool = True

    def is_wanted(self) -> bool:
        return self.useful

    def sent(self, began_at: float) -> None:
        self.log.append((began_at, self.agenda.now))


def test_parcels_are_sent_in_order_and_useless_ones_are_skipped() -> None:
    agenda = Agenda()
    line = SimulatedUplink(agenda, 10.0)
    sent: list[tuple[float, float]] = []
    for number in range(3):
        line.send(20.0, Parcel(agenda, sent, useful=number != 1))
    while agenda.next_at < float("inf"):
        agenda.advance()
    assert sent == [(0.0, 2.0), (2.0, 4.0)]
    line.send(10.0, Parcel(agenda, sent))
    agenda.advance()
    assert sent[-1] == (4.0, 5.0)


def test_a_downlink_delays_only_faster_senders() -> None:
    line = Downlink(10.0)
    assert line.receive(10.0, first_at=0.0, last_at=5.0) == pytest.approx(5.0)
    assert line.receive(10.0, first_at=4.9, last_at=5.0) == pytest.approx(6.0)
    assert line.receive(10.0, first_at=20.0, last_at=20.1) == pytest.approx(21.0)
