from __future__ import annotations

from dataclasses import is_dataclass
from typing import get_args

from echo_hub.core.accounting import events
from echo_hub.core.accounting.events import Event
from echo_hub.core.coordinator import HANDLERS


def test_no_event_is_left_out_of_the_union() -> None:
    defined = {kind for kind in vars(events).values() if is_dataclass(kind) and kind.__module__ == events.__name__}
    assert defined == set(get_args(Event))


def test_the_coordinator_handles_every_event_and_no_other() -> None:
    assert set(HANDLERS) == set(get_args(Event))
