import logging
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hub.tasks.math_answers import Verdict, is_equal, judge
from echo_hub.tasks.math_forms import Form


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("42", "42"),
        ("The answer is 42.", "42"),
        ("There are 7 apples, then 5, so \\boxed{42}", "42"),
        ("\\boxed{42} is what I say, not 41.", "42"),
        ("<answer>1/2</answer>", "\\frac{1}{2}"),
        ("so $x = \\frac12$", "0.5"),
        ("\\boxed{x+1}", "1+x"),
        ("$\\{1,2\\}$", "\\{2,1\\}"),
        ("<answer>(1,2)</answer>", "(1,2)"),
        ("<answer>\\sqrt{8}</answer>", "$2\\sqrt{2}$"),
        ("1,000", "1000"),
        ("50%", "0.5"),
        ("-3", "-3"),
        ("<answer>4</answer><answer>3</answer>", "3"),
    ],
)
def test_equal_mathematics_is_right_however_it_is_written(completion: str, expected: str) -> None:
    assert is_equal(completion, expected)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("", "42"),
        ("no idea", "42"),
        ("41", "42"),
        ("42 apples and \\boxed{41}", "42"),
        ("<answer>42</answer><answer>41</answer>", "42"),
        ("1 2 3 4 5", "3"),
        ("__import__('os').getpid()", "42"),
    ],
)
def test_anything_else_is_wrong(completion: str, expected: str) -> None:
    assert not is_equal(completion, expected)


@pytest.mark.parametrize("hedged", ["\\boxed{1} \\boxed{2}", "\\boxed{1, 2}", "\\boxed{1 or 2}"])
@pytest.mark.parametrize("expected", ["1", "2"])
def test_several_answers_at_once_are_none(hedged: str, expected: str) -> None:
    assert not is_equal(hedged, expected)


@pytest.mark.parametrize("expected", ["\\boxed{}", "$", ".", "***"])
def test_an_expected_answer_that_says_nothing_is_not_given_by_nothing(expected: str) -> None:
    assert not any(is_equal(answer, expected) for answer in ("", " ", "5", "<answer></answer>"))


@pytest.mark.parametrize(
    "part", [".*", "\\boxed{", "<answer>", " and ", "\\frac", "$", "(", "1,", "9", " ", "answer: "]
)
@pytest.mark.parametrize("expected", ["42", "x + 1", "Yes", "5 cm"])
def test_a_hundred_thousand_times_the_same_takes_no_longer_for_it(part: str, expected: str) -> None:
    """Whoever looks to the end from each would take minutes."""
    assert not is_equal(f"<answer>{part * 100_000}</answer>", expected, question="What is x + 1?")


def test_it_needs_no_signals_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    results: list[bool] = []
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=lambda: results.append(is_equal("\\boxed{6}", "6")))
        thread.start()
        thread.join()
    assert results == [True]
    assert caplog.text == ""


def test_powers_of_powers_are_counted_and_not_gone_through() -> None:
    tower = "((((x+1)^{99})^{99})^{99})^{99}"
    assert is_equal(tower, tower, question="Factor it.")
    assert judge(f"<answer>1 \\cdot {tower}</answer>", tower, question="Factor it.") is Verdict.NOT_UNDERSTOOD


PIECES = [
    "<answer>",
    "</answer>",
    "\\boxed{",
    "}",
    "{",
    "$",
    "x",
    "1",
    "23",
    "+",
    "-",
    "/",
    "^",
    "=",
    "<",
    "\\le",
    ",",
    "(",
    "]",
]
MORE = [
    "\\frac",
    "\\sqrt",
    "\\pi",
    "\\infty",
    "\\text",
    "\\pm",
    "\\cup",
    "%",
    "\\$",
    " cm",
    " or ",
    ".",
    "0",
    "\\{",
    "\\}",
    "!",
    "i",
]
EXPECTED = [
    "42",
    "5 cm",
    "(x-1)(x+1)",
    "2\\sqrt{2}",
    "(0,1]",
    "\\{1,2\\}",
    "x < 3",
    "Yes",
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES + MORE), max_size=12).map("".join),
    st.sampled_from(EXPECTED),
    st.sampled_from([None, *Form]),
)
def test_whatever_is_written_is_right_or_wrong(answer: str, expected: str, form: Form | None) -> None:
    """A scorer that fails is no verdict."""
    for completion in (answer, f"<answer>{answer}</answer>"):
        assert is_equal(completion, expected, question="Solve 2x < 6, or factor x^2-1.", form=form) in (True, False)


TABLE = tomllib.loads(Path(__file__).with_name("math_verdicts.toml").read_text())["group"]


def verdicts(group: dict[str, Any]) -> dict[str, bool]:
    """Of all answers of a group."""
    form = Form(group["form"]) if "form" in group else None
    written = (lambda text: text) if group.get("as_is") else "<answer>{}</answer>".format
    answers = [*group["right"], *group["wrong"]]
    question = group.get("question", "")
    return {text: is_equal(written(text), group["expected"], question=question, form=form) for text in answers}


@pytest.mark.parametrize("group", TABLE, ids=lambda group: f"{group['expected']} {group['why']}")
def test_every_verdict_is_the_intended_one(group: dict[str, Any]) -> None:
    found = verdicts(group)
    assert {text for text, is_right in found.items() if is_right} == set(group["right"])


def test_there_are_more_than_three_hundred() -> None:
    assert sum(len(group["right"]) + len(group["wrong"]) for group in TABLE) > 300


def test_no_answer_is_right_and_wrong() -> None:
    assert [group["why"] for group in TABLE if set(group["right"]) & set(group["wrong"])] == []
