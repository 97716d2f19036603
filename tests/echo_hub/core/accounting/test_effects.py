from __future__ import annotations

from dataclasses import is_dataclass
from typing import get_args

from echo_hub.core.accounting import effects
from echo_hub.core.accounting.effects import ACTIONS, RECORDS, Effect


def test_every_effect_is_either_a_record_or_an_action() -> None:
    """Effects of neither kind would be lost; effects of both kinds would happen twice."""
    assert set(RECORDS) & set(ACTIONS) == set()
    assert set(RECORDS) | set(ACTIONS) == set(get_args(Effect))


def test_no_effect_is_left_out_of_the_union() -> None:
    defined = {kind for kind in vars(effects).values() if is_dataclass(kind) and kind.__module__ == effects.__name__}
    assert defined == set(get_args(Effect))
