from __future__ import annotations

from echo_hub.tasks.arithmetic import make_arithmetic
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Environment, ReplayedEnvironment, Session
from echo_hub.tasks.environments.guess import make_guess


class Stateful:
    name = "of a test"

    def sample(self, seed: int) -> Problem:
        return Problem(prompt=str(seed))

    async def open(self, problem: Problem, seed: int) -> Session:
        raise NotImplementedError


def test_environments_are_distinguished_from_single_turn_tasks() -> None:
    assert isinstance(make_guess({}), ReplayedEnvironment) and not isinstance(make_guess({}), Environment)
    assert isinstance(Stateful(), Environment) and not isinstance(Stateful(), ReplayedEnvironment)
    assert not isinstance(make_arithmetic({}), ReplayedEnvironment | Environment)
