from collections.abc import Mapping
from typing import Any

import pytest

from echo_hub.tasks.base import Problem
from echo_hub.tasks.registry import make_task
from echo_hub.tasks.stream import ProblemStream
from echo_shared.errors import ConfigError


def stream(*, seed: int = 0, heldout: int = 50, options: Mapping[str, Any] | None = None) -> ProblemStream:
    return ProblemStream(make_task("arithmetic", options or {}), run_seed=seed, heldout_problems=heldout)


def test_problems_depend_on_their_number_alone_not_on_the_order_of_asking() -> None:
    first, second = stream(), stream()
    ahead = [first.train(number) for number in range(40)], [first.heldout(number) for number in range(50)]
    backward = (
        [second.heldout(n) for n in reversed(range(50))][::-1],
        [second.train(n) for n in reversed(range(40))][::-1],
    )
    assert ahead == backward[::-1]


def test_runs_with_other_seeds_train_on_other_problems_and_share_the_held_out_set() -> None:
    one, other = stream(seed=1), stream(seed=2)
    assert [one.heldout(n) for n in range(50)] == [other.heldout(n) for n in range(50)]
    shared = {one.train(n).prompt for n in range(500)} & {other.train(n).prompt for n in range(500)}
    assert len(shared) < 10


def test_neighbouring_numbers_share_nothing() -> None:
    assert len({stream().train(number).prompt for number in range(500)}) > 490


def test_a_smaller_held_out_set_is_the_beginning_of_a_larger_one() -> None:
    small, large = stream(heldout=10), stream(heldout=50)
    assert [small.heldout(n) for n in range(10)] == [large.heldout(n) for n in range(10)]


def test_training_never_shows_a_held_out_prompt_even_when_most_are_held_out() -> None:
    tight = stream(heldout=90, options={"digits": 1})
    heldout = {tight.heldout(number).prompt for number in range(90)}
    assert len(heldout) == 90
    train = {tight.train(number).prompt for number in range(300)}
    assert train
    assert not train & heldout


@pytest.mark.parametrize("heldout", [100, 101])
def test_a_task_too_small_for_its_held_out_set_is_refused(heldout: int) -> None:
    with pytest.raises(ConfigError, match="too few different problems"):
        stream(heldout=heldout, options={"digits": 1}).train(0)


class Constant:
    """A task with a single problem."""

    name = "constant"

    def sample(self, seed: int) -> Problem:
        return Problem(prompt="?")

    def score(self, problem: Problem, completion: str) -> float:
        return 0.0


def test_the_only_problem_can_be_held_out_or_trained_on_not_both() -> None:
    only = ProblemStream(Constant(), run_seed=0, heldout_problems=1)
    assert only.heldout(0).prompt == "?"
    with pytest.raises(ConfigError, match="heldout_problems"):
        only.train(0)
