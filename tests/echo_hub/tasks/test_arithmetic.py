import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.tasks.arithmetic import make_arithmetic
from echo_hub.tasks.base import Problem
from echo_shared.errors import ConfigError

SEEDS = st.integers(0, 2**64 - 1)
SUM = Problem(prompt="123+456=", metadata={"answer": "579"})


@given(seed=SEEDS, digits=st.integers(2, 6), operation=st.sampled_from("+-*"))
def test_the_answer_is_the_result_and_operands_have_the_digits_asked_for(
    seed: int, digits: int, operation: str
) -> None:
    problem = make_arithmetic({"digits": digits, "operations": [operation]}).sample(seed)
    left, right = problem.prompt.removesuffix("=").split(operation)
    assert len(left) == len(right) == digits
    expected = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[operation]
    assert problem.metadata["answer"] == str(expected)


@given(seed=SEEDS)
def test_the_same_seed_gives_the_same_problem(seed: int) -> None:
    assert make_arithmetic({}).sample(seed) == make_arithmetic({}).sample(seed)


def test_every_operation_and_every_digit_of_one_digit_problems_occurs() -> None:
    task = make_arithmetic({"digits": 1, "operations": ["+", "-"]})
    prompts = [task.sample(seed).prompt for seed in range(400)]
    assert {prompt[1] for prompt in prompts} == {"+", "-"}
    assert {prompt[0] for prompt in prompts} == set("0123456789")


@pytest.mark.parametrize("completion", ["579", " 579", "579\n", "\t579  "])
def test_the_exact_number_earns_one(completion: str) -> None:
    assert make_arithmetic({}).score(SUM, completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    ["", " ", "578", "5790", "57", "0579", "+579", "579.0", "5 79", "579 is it", "=579", "579579", "five", "579\n579"],
)
def test_other_answers_earn_nothing(completion: str) -> None:
    assert make_arithmetic({}).score(SUM, completion) == 0.0


def test_negative_answers_are_scored_with_their_sign() -> None:
    problem = Problem(prompt="12-45=", metadata={"answer": "-33"})
    task = make_arithmetic({"digits": 2, "operations": ["-"]})
    assert [task.score(problem, text) for text in ("-33", "33", "- 33")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"digit": 3}, "task.options.digit "),
        ({"digits": 0}, "task.options.digits "),
        ({"digits": "three"}, "task.options.digits "),
        ({"operations": ["/"]}, "task.options.operations.0 "),
        ({"operations": []}, "task.options.operations "),
    ],
)
def test_a_wrong_option_is_named_with_the_valid_ones(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_arithmetic(options)
    assert named in str(caught.value)
    assert "digits, operations" in str(caught.value)
