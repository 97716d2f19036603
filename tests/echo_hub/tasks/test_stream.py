from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Session
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


def test_a_stream_skips_given_held_out_prompts() -> None:
    task = Counted(make_task("arithmetic", {}))
    told = ProblemStream(task, run_seed=0, heldout_problems=50, heldout=stream().held_out)
    assert told.heldout(49) == stream().heldout(49)
    assert told.train(3) == stream().train(3)
    assert task.samples == 2


class Counted:
    """Gives the problems of another task, and counts the calls."""

    def __init__(self, task: Any) -> None:
        self.name = task.name
        self.samples = 0
        self._task = task

    def sample(self, seed: int) -> Problem:
        self.samples += 1
        problem: Problem = self._task.sample(seed)
        return problem

    def score(self, problem: Problem, completion: str) -> float:
        return 0.0


def test_prompts_that_do_not_fit_are_skipped_and_others_stay() -> None:
    class NotOne:
        def fits(self, prompt: str) -> bool:
            return prompt[0] != "1"

    fitting = ProblemStream(make_task("arithmetic", {}), run_seed=0, heldout_problems=50, fitting=NotOne())
    for some, same in (
        ([fitting.train(n) for n in range(200)], [stream().train(n) for n in range(200)]),
        ([fitting.heldout(n) for n in range(50)], [stream().heldout(n) for n in range(50)]),
    ):
        assert not [problem for problem in some if problem.prompt[0] == "1"]
        assert [one == other for one, other in zip(some, same, strict=True)] == [p.prompt[0] != "1" for p in same]


class Changing(Counted):
    """A task that breaks the rule "one seed, one problem": it returns another problem at each call."""

    def sample(self, seed: int) -> Problem:
        self.samples += 1
        return Problem(prompt=str(self.samples))


def test_a_task_that_gives_another_problem_for_the_same_seed_is_found_out() -> None:
    with pytest.raises(ConfigError, match="same problem for the same seed"):
        ProblemStream(Changing(make_task("arithmetic", {})), run_seed=0, heldout_problems=2).heldout(0)


class Constant:
    name = "constant"

    def sample(self, seed: int) -> Problem:
        return Problem(prompt="?")

    def score(self, problem: Problem, completion: str) -> float:
        return 0.0


def test_the_only_problem_can_be_held_out_or_trained_on_not_both() -> None:
    only = ProblemStream(Constant(), run_seed=0, heldout_problems=1)
    assert only.heldout(0).prompt == "?"
    with pytest.raises(ConfigError, match=r"evaluation\.problems"):
        only.train(0)


def test_a_task_that_is_too_small_is_refused_when_the_stream_is_prepared() -> None:
    with pytest.raises(ConfigError, match="too few different problems"):
        stream(heldout=101, options={"digits": 1}).prepare()
    stream(heldout=50).prepare()


class Numbered:
    """Reads problems from a file, including some unusable ones, and counts how often each problem is read."""

    name = "numbered"
    num_heldout = 0
    content_hash = "x"

    def __init__(self, *prompts: str) -> None:
        self.prompts = prompts
        self.read: Counter[int] = Counter()

    @property
    def num_problems(self) -> int:
        return len(self.prompts)

    def sample(self, seed: int) -> Problem:
        return self.problem(seed % len(self.prompts))

    def problem(self, number: int) -> Problem:
        self.read[number] += 1
        return Problem(prompt=self.prompts[number])

    def heldout(self, number: int) -> Problem:
        raise AssertionError(number)

    def score(self, problem: Problem, completion: str) -> float:
        return 0.0


class Short:
    def fits(self, prompt: str) -> bool:
        if "half" in prompt:
            raise ConfigError("It holds half of a character.", got=prompt, do="Correct the file.")
        return len(prompt) < 10


LONG, HALF = "much too long", "a half"


@pytest.mark.parametrize("draws", ["epochs", "replacement"])
@pytest.mark.parametrize("wrong", [(HALF,), (LONG,), (HALF, LONG), (HALF,) * 5, (LONG, HALF, "another half", LONG)])
def test_a_problem_that_cannot_be_asked_is_passed_over(wrong: tuple[str, ...], draws: str) -> None:
    task = Numbered(*wrong, "1", "2", "3", "4")
    problems = ProblemStream(task, run_seed=0, heldout_problems=1, fitting=Short(), in_epochs=draws == "epochs")
    problems.prepare()
    assert {problems.train(number).prompt for number in range(100)} == {"1", "2", "3", "4"} - set(
        problems.heldout_prompts
    )
    again = ProblemStream(
        Numbered(*task.prompts), run_seed=0, heldout_problems=1, fitting=Short(), in_epochs=draws == "epochs"
    )
    assert [again.train(n) for n in range(20)] == [problems.train(n) for n in range(20)], "as after a restart"
    if draws == "replacement":
        assert all(task.read[number] == 1 for number in range(len(wrong)))


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([LONG], "too long"),
        ([LONG] * 3, "1000 of 1000 problems were too long"),
        ([HALF], "cannot be given to the model"),
        ([HALF, LONG], "It holds half of a character. (a half)"),
        (["another half"] * 7, "Correct the file."),
    ],
)
def test_a_task_without_usable_problems_is_refused_after_one_pass(prompts: list[str], said: str) -> None:
    task = Numbered(*prompts)
    with pytest.raises(ConfigError) as caught:
        ProblemStream(task, run_seed=0, heldout_problems=0, fitting=Short()).prepare()
    assert said in str(caught.value)
    assert task.read == dict.fromkeys(range(len(prompts)), 1)


class Hidden:
    """An environment with state whose problems all have the same prompt."""

    name = "hidden"

    def sample(self, seed: int) -> Problem:
        return Problem(prompt="guess", metadata={"number": seed})

    async def open(self, problem: Problem, seed: int) -> Session:
        raise NotImplementedError


def test_problems_of_an_environment_with_state_differ_by_their_seeds() -> None:
    hidden = ProblemStream(Hidden(), run_seed=1, heldout_problems=20)
    trained = [hidden.train(number).metadata["number"] for number in range(100)]
    held = [hidden.heldout(number).metadata["number"] for number in range(20)]
    assert len({*trained, *held}) == 120
    assert hidden.held_out.prompts == ("guess",) * 20 and list(hidden.held_out.seeds) == held
    known = ProblemStream(Hidden(), run_seed=2, heldout_problems=20, heldout=hidden.held_out)
    assert [known.heldout(number).metadata["number"] for number in range(20)] == held
