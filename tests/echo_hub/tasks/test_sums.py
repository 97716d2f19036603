import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.tasks.base import Problem
from echo_hub.tasks.sums import make_sums
from echo_shared.errors import ConfigError

SUM = Problem(prompt="What is 7 + 6?", metadata={"answer": "13"})


@given(seed=st.integers(0, 2**64 - 1), operation=st.sampled_from("+-"))
def test_the_answer_is_the_result_of_the_two_numbers_in_the_text(seed: int, operation: str) -> None:
    options = {"operations": [operation], "smallest": 3, "largest": 40}
    problem = make_sums(options).sample(seed)
    assert problem == make_sums(options).sample(seed)
    found = re.fullmatch(r"What is (\d+) ([+-]) (\d+)\?", problem.prompt)
    assert found is not None and found[2] == operation
    left, right, answer = int(found[1]), int(found[3]), int(problem.metadata["answer"])
    assert answer == (left + right if operation == "+" else left - right)
    assert all(3 <= term <= 40 for term in ((left, right) if operation == "+" else (answer, right)))


def test_all_sums_are_drawn() -> None:
    prompts = {make_sums({"largest": 4}).sample(seed).prompt for seed in range(400)}
    assert prompts == {f"What is {left} + {right}?" for left in range(1, 5) for right in range(1, 5)}


RIGHT = ("13", " 13\n", "13.", "7 plus 6 is 13.", "7 + 6 = 13", "The answer is **13**", "12, no: 13", "$13")
WRONG = ("", "thirteen", "1", "3", "113", "13.5", "13,000", "-13", "13 + 6", "7 + 6 = 13, so 14", "013", "1 3")


@pytest.mark.parametrize("completion", RIGHT)
def test_the_right_number_at_the_end_earns_one(completion: str) -> None:
    assert make_sums({}).score(SUM, completion) == 1.0


@pytest.mark.parametrize("completion", WRONG)
def test_other_answers_earn_nothing(completion: str) -> None:
    assert make_sums({}).score(SUM, completion) == 0.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"digits": 3}, "digits"),
        ({"operations": ["*"]}, "operations"),
        ({"operations": []}, "operations"),
        ({"smallest": 9, "largest": 8}, "smallest must be at most largest"),
        ({"smallest": -1}, "smallest"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)sums.*{named}"):
        make_sums(options)
