import pytest

from echo_hub.tasks.math_extraction import answers_in, without_prose


@pytest.mark.parametrize(
    ("completion", "answers"),
    [
        ("<answer>5</answer>", ["5"]),
        (r"<answer>so \boxed{5}.</answer>", ["5"]),
        (r"<answer>-\boxed{5}</answer>", [r"-5"]),
        (r"<answer>not \boxed{5}</answer>", [r"not \boxed{5}"]),
        (r"<answer>x=7, \boxed{5}</answer>", [r"x=7, \boxed{5}"]),
        (r"First \boxed{5}. Then \boxed{5} and \fbox{6}", ["5", "6"]),
        (r"\boxed{\frac{1}{2}", [r"\frac{1}{2}"]),
        (r"so $2\boxed{5}$", ["25"]),
        (r"\boxed{5}^2", ["5^2"]),
        (r"\boxed{5}\text{ cm}", [r"5\text{ cm}"]),
        (r"x \neq \boxed{5}", [r"\neq 5"]),
        (r"$\therefore \boxed{5}$", ["5"]),
        ("- \\boxed{5}", ["5"]),
        ("The answer is x + 1. Good.", ["x + 1"]),
        ("so $x=1$ or $x=2$", ["x=1, x=2"]),
        ("first $1$ then $x=2$", ["x=2"]),
        ("3+4=7", ["7"]),
        ("It is 5 cm long.", ["5 cm"]),
        ("", [""]),
    ],
)
def test_an_announced_answer_is_found(completion: str, answers: list[str]) -> None:
    assert answers_in(completion) == answers


@pytest.mark.parametrize(
    "text", ["x = 2√2", "It is 5 or 6", "at least 6", "half of 6", "3 + 6", "x<6", "6!", "5:6", "12,6", "x_6", "6x"]
)
def test_the_last_number_counts_only_if_it_stands_alone(text: str) -> None:
    assert answers_in(text) == [text]


@pytest.mark.parametrize(
    ("said", "rest"),
    [
        ("The answer is 5", "5"),
        ("so: 5", "5"),
        ("She has about 5", "5"),
        ("答案是42", "42"),
        ("Either it is 5", None),
        ("The negative is 5", None),
        ("square root of 5", None),
        ("5", None),
    ],
)
def test_words_before_an_answer_are_known(said: str, rest: str | None) -> None:
    assert without_prose(said) == rest
