from __future__ import annotations

from echo_hub.tasks.arithmetic import make_arithmetic
from echo_hub.tasks.environments.base import Environment
from echo_hub.tasks.environments.guess import make_guess


def test_environments_are_distinguished_from_single_turn_tasks() -> None:
    assert isinstance(make_guess({}), Environment)
    assert not isinstance(make_arithmetic({}), Environment)
