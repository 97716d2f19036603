import logging
import threading
import tomllib
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hub.tasks.math_answers import Understanding, Verdict, is_equal, judge, understanding
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
def test_equal_answers_are_right_in_any_notation(completion: str, expected: str) -> None:
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
def test_other_answers_are_wrong(completion: str, expected: str) -> None:
    assert not is_equal(completion, expected)


@pytest.mark.parametrize("hedged", ["\\boxed{1} \\boxed{2}", "\\boxed{1, 2}", "\\boxed{1 or 2}"])
@pytest.mark.parametrize("expected", ["1", "2"])
def test_several_answers_at_once_do_not_count(hedged: str, expected: str) -> None:
    assert not is_equal(hedged, expected)


@pytest.mark.parametrize("expected", ["\\boxed{}", "$", ".", "***"])
def test_an_empty_expected_answer_matches_no_answer(expected: str) -> None:
    assert not any(is_equal(answer, expected) for answer in ("", " ", "5", "<answer></answer>"))


@pytest.mark.parametrize(
    "part", [".*", "\\boxed{", "<answer>", " and ", "\\frac", "$", "(", "1,", "9", " ", "answer: "]
)
@pytest.mark.parametrize("expected", ["42", "x + 1", "Yes", "5 cm"])
def test_a_hundred_thousand_repetitions_are_fast(part: str, expected: str) -> None:
    """Check the time: a search from each repetition to the end of the text takes minutes."""
    assert not is_equal(f"<answer>{part * 100_000}</answer>", expected, question="What is x + 1?")


def test_comparison_uses_no_signals_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
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
def test_every_completion_gets_a_verdict(answer: str, expected: str, form: Form | None) -> None:
    """Every text that a model may write gets a verdict; no text raises an error."""
    for completion in (answer, f"<answer>{answer}</answer>"):
        assert is_equal(completion, expected, question="Solve 2x < 6, or factor x^2-1.", form=form) in (True, False)


HERE = Path(__file__).parent
TABLE = tomllib.loads((HERE / "math_verdicts.toml").read_text())["group"]
REPORTS = {path.stem: tomllib.loads(path.read_text())["group"] for path in sorted((HERE / "reports").glob("*.toml"))}
OWN = REPORTS["own"]
FILES = {"table": TABLE, **REPORTS}
ALL = [group for groups in FILES.values() for group in groups]


def verdicts(group: dict[str, Any]) -> dict[str, bool]:
    form = Form(group["form"]) if "form" in group else None
    written = (lambda text: text) if group.get("as_is") else "<answer>{}</answer>".format
    answers = [*group["right"], *group["wrong"]]
    question = group.get("question", "")
    return {text: is_equal(written(text), group["expected"], question=question, form=form) for text in answers}


@pytest.mark.parametrize("file", FILES)
def test_every_verdict_is_the_intended_one(file: str) -> None:
    """Each group in a file has right and wrong answers to one reference answer. A failed test shows all groups with
    unexpected verdicts, and their answers."""
    odd = {}
    for group in FILES[file]:
        found = {text for text, is_right in verdicts(group).items() if is_right}
        if found != set(group["right"]):
            odd[f"{group['expected']} {group.get('why', '')}"] = found ^ set(group["right"])
    assert odd == {}


def test_there_are_more_than_eighteen_hundred() -> None:
    assert sum(len(group["right"]) + len(group["wrong"]) for group in ALL) > 1_800


@pytest.mark.parametrize("kind", [*(f"a{number}" for number in range(1, 14)), "a17"])
def test_each_reported_kind_has_its_own_inputs(kind: str) -> None:
    groups = [group for group in OWN if group["kind"] == kind]
    assert sum(len(group["right"]) + len(group["wrong"]) for group in groups) >= 5


def test_no_answer_is_right_and_wrong() -> None:
    assert [group["expected"] for group in ALL if set(group["right"]) & set(group["wrong"])] == []


@pytest.mark.parametrize("file", FILES)
def test_a_reference_answer_is_right(file: str) -> None:
    expected = [group["expected"] for group in FILES[file] if "form" not in group]
    assert [text for text in expected if not is_equal(f"<answer>{text}</answer>", text)] == []


ENDS = st.tuples(st.sampled_from("[("), st.integers(-9, 9), st.integers(-9, 9), st.sampled_from(")]"))


@settings(deadline=None)
@given(ENDS, ENDS)
def test_an_interval_is_right_only_if_all_its_parts_are(
    answer: tuple[str, int, int, str], expected: tuple[str, int, int, str]
) -> None:
    texts = ["{}{}, {}{}".format(*ends) for ends in (answer, expected)]
    assert is_equal(f"<answer>{texts[0]}</answer>", texts[1]) == (texts[0] == texts[1])
    opening, low, high, closing = answer
    if low < high:
        signs = [r"\le" if bracket in "[]" else "<" for bracket in (opening, closing)]
        condition = f"{low} {signs[0]} x {signs[1]} {high}"
        assert is_equal(f"<answer>{condition}</answer>", texts[1]) == (texts[0] == texts[1])


NUMBERS = st.lists(st.integers(-3, 3), min_size=2, max_size=4)


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_tuples_have_an_order_and_lists_have_none(answer: list[int], expected: list[int]) -> None:
    answered, wanted = (", ".join(map(str, numbers)) for numbers in (answer, expected))
    assert is_equal(f"<answer>({answered})</answer>", f"({wanted})") == (answer == expected)
    assert is_equal(f"<answer>{answered}</answer>", f"\\{{{wanted}\\}}") == (sorted(answer) == sorted(expected))
    assert not is_equal(f"<answer>({answered})</answer>", f"\\{{{wanted}\\}}")


def polynomial(numbers: list[int]) -> str:
    return "+".join(f"({number})x^{{{power}}}" for power, number in enumerate(numbers))


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_polynomials_are_right_by_their_coefficients(answer: list[int], expected: list[int]) -> None:
    length = max(len(answer), len(expected))
    is_same = answer + [0] * (length - len(answer)) == expected + [0] * (length - len(expected))
    wanted = f"y={polynomial(expected)}"
    assert is_equal(f"<answer>y={polynomial(answer)}</answer>", wanted) == is_same
    doubled = f"\\frac{{{polynomial([2 * number for number in reversed(answer)])}}}{{2}}"
    assert is_equal(f"<answer>y={doubled}</answer>", wanted) == (
        answer[::-1] + [0] * (length - len(answer)) == expected + [0] * (length - len(expected))
    )


HOSTILE = [
    "9^{9^{9^9}}",
    "(x+1)^{1000000}",
    "10^{10^9}!",
    r"\binom{10^9}{10^8}",
    r"\sum_{k=1}^{10^{12}} k",
    r"e^{e^{e^{e^{e}}}}",
    r"\sqrt[10^9]{10^{10^9}}",
    r"\lfloor e^{500}\rfloor",
    "((((9!)!)!)!)",
    "x^{x^{x^{x^x}}}",
    "(1+i)^{10^{12}}",
    "(" * 400 + "1" + ")" * 400,
    r"\frac{1}{1+" * 25 + "x" + "}" * 25,
    r"\sin(" * 25 + "x" + ")" * 25,
    "{" * 450 + "5" + "}" * 450,
    "x<" * 300 + "1",
    "1," * 450,
    "+".join(f"({number})!" for number in range(4_900, 5_000)),
    "+".join(rf"\binom{{x+{number}}}{{{number}}}e^{{-100}}" for number in range(1, 30)),
    r"\{" + ",".join(f"x+e^{{{number}}}" for number in range(60)) + r"\}",
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda text: text[:30])
@pytest.mark.parametrize("form", [None, Form.SIMPLIFIED, Form.FACTORED])
def test_no_answer_takes_a_second(hostile: str, form: Form | None) -> None:
    is_equal("$x+1$", "1+x"), is_equal("1 cm", "1 m")
    for answer, expected in [(hostile, "42"), (hostile, "x+1"), (hostile, hostile + " + 0"), ("x", hostile)]:
        begin = process_time()
        assert not is_equal(f"<answer>{answer}</answer>", expected, form=form) or expected.endswith("+ 0")
        assert process_time() - begin < 1


@pytest.mark.parametrize(
    ("expected", "read"),
    [
        ("42", Understanding.NUMBER),
        ("5 cm", Understanding.NUMBER),
        ("x+1", Understanding.FORMULA),
        (r"\{1,2\}", Understanding.FORMULA),
        ("4:30 p.m.", Understanding.FORMULA),
        ("Yes", Understanding.WORDS),
        ("(B)", Understanding.WORDS),
        ("no solution", Understanding.WORDS),
        (r"1, 2, \ldots, n", Understanding.TEXT),
        (r"\int_0^1 x dx", Understanding.TEXT),
        ("9 apples ? ~", Understanding.TEXT),
        ("x" * 5_000, Understanding.TEXT),
    ],
)
def test_a_reference_answer_is_understood_or_not(expected: str, read: Understanding) -> None:
    assert understanding(expected) is read


@pytest.mark.parametrize(
    ("answer", "expected", "verdict"),
    [
        ("42", "42", Verdict.RIGHT),
        ("41", "42", Verdict.WRONG),
        ("about the square root of 42", "42", Verdict.NOT_UNDERSTOOD),
        ("x-1", "x+1", Verdict.WRONG),
        (r"x \oplus 1", "x+1", Verdict.NOT_UNDERSTOOD),
        (r"x \oplus 1", r"x\oplus1", Verdict.RIGHT),
        (r"x \oplus 2", r"x\oplus1", Verdict.NOT_UNDERSTOOD),
        ("No", "Yes", Verdict.WRONG),
        ("(x+1)^{1000000}", "(x+2)^{1000000}", Verdict.NOT_UNDERSTOOD),
    ],
)
def test_answers_that_cannot_be_read_have_their_own_verdict(answer: str, expected: str, verdict: Verdict) -> None:
    assert judge(f"<answer>{answer}</answer>", expected) is verdict
