import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.tasks.base import Problem
from echo_hub.tasks.worked import make_worked
from echo_shared.errors import ConfigError

SUM = Problem(prompt="4821+977:", metadata={"answer": "5798"})


@given(seed=st.integers(0, 2**64 - 1), operation=st.sampled_from("+*"))
def test_the_answer_is_the_result_and_numbers_have_the_digits_asked_for(seed: int, operation: str) -> None:
    options = {"operations": [operation], "shortest": 2, "longest": 9, "longest_factor": 4}
    problem = make_worked(options).sample(seed)
    assert problem == make_worked(options).sample(seed)
    left, right = problem.prompt.removesuffix(":").split(operation)
    fewest, most = (2, 9) if operation == "+" else (1, 4)
    assert all(fewest <= len(number) <= most and str(int(number)) == number for number in (left, right))
    expected = int(left) + int(right) if operation == "+" else int(left) * int(right)
    assert problem.metadata["answer"] == str(expected)


def test_numbers_of_all_lengths_are_as_likely() -> None:
    task = make_worked({"longest": 8})
    lengths = [len(task.sample(seed).prompt.partition("+")[0]) for seed in range(800)]
    assert all(60 <= lengths.count(length) <= 140 for length in range(1, 9))


RIGHT = ("<answer>5798</answer>", "1+7+0=08\n<answer> 5798\n</answer>", "<answer>1</answer><answer>5798</answer>, yes")
WRONG = (
    "",
    "5798",
    SUM.prompt,
    "<answer></answer>",
    "<answer>05798</answer>",
    "<answer>4821+977</answer>",
    "<answer>5798.",
    "<answer>5798</answer><answer>5799</answer>",
    "<answer>5798 or 5799</answer>",
    "<ANSWER>5798</ANSWER>",
)


@pytest.mark.parametrize("completion", RIGHT)
def test_the_exact_number_in_the_last_answer_earns_one(completion: str) -> None:
    assert make_worked({}).score(SUM, completion) == 1.0


@pytest.mark.parametrize("completion", WRONG)
def test_other_answers_earn_nothing(completion: str) -> None:
    assert make_worked({}).score(SUM, completion) == 0.0


@pytest.mark.parametrize(
    ("options", "named"),
    [({"digits": 3}, "digits"), ({"longest": 99}, "longest"), ({"shortest": 5, "longest": 4}, "shortest must be at")],
)
def test_options_that_do_not_fit_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)worked.*{named}"):
        make_worked(options)
