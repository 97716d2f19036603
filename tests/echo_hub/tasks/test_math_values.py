from fractions import Fraction

import pytest
from sympy import Basic

from echo_hub.tasks.exact_numbers import TooMuch
from echo_hub.tasks.math_expressions import read_expression
from echo_hub.tasks.math_tokens import nodes
from echo_hub.tasks.math_values import approximation, bounded_work, constant_ratio, is_rational, is_same_value


def expression(text: str) -> Basic:
    return read_expression(nodes(text))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"\sin^2 x+\cos^2 x", "1"),
        (r"\sqrt{x^2}", "|x|"),
        (r"\sqrt{xy}", r"\sqrt{x}\sqrt{y}"),
        (r"e^{i\pi}", "-1"),
        (r"\sqrt[3]{-8}", "-2"),
        ("(-1)^{n+2}", "(-1)^n"),
        (r"\frac{n!}{(n-1)!}", "n"),
        (r"\frac{1}{2004!}", r"(2004!)^{-1}"),
        ("(x+1)^{50}", "(1+x)^{50}"),
        (r"\ln 8", r"3\ln 2"),
        (r"\cos(n\pi)", "(-1)^n"),
        (r"\frac{n(n+1)}{2}", r"\sum_{k=1}^{n} k"),
        ("55", r"\sum_{k=1}^{10} k"),
        ("n!", r"\prod_{k=1}^n k"),
        (r"2\sum_{i=1}^{3} \sum_{j=1}^{i} ij", "50"),
    ],
)
def test_equal_values_are_found(answer: str, expected: str) -> None:
    assert is_same_value(expression(answer), expression(expected))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"\sqrt{x^2}", "x"),
        (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"),
        (r"\ln x", r"\ln|x|"),
        (r"\pi+10^{-100}", r"\pi"),
        (r"\pi-e^{-200}", r"\pi"),
        (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),
        ("262537412640768744", r"e^{\pi\sqrt{163}}"),
        (r"0 \cdot \gcd(x, 1)", r"\sin(\pi x)"),
        (r"x+10^{-9999}", "x"),
        ("(-1)^{n+1}", "(-1)^n"),
        (r"\frac{n(n-1)}{2}", r"\sum_{k=1}^{n} k"),
        (r"\sum_{k=1}^{n} k^2", r"\sum_{k=1}^{n} k"),
    ],
)
def test_nearly_equal_ones_are_not(answer: str, expected: str) -> None:
    assert not is_same_value(expression(answer), expression(expected))


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}",
        "(x+1)^{1000000}",
        "10^{10^9}!",
        r"\binom{10^9}{5}",
        r"\sum_{k=1}^{10^9} k",
        "e^{e^{e^e}}",
        r"\sin(e^{10^9})",
    ],
)
def test_values_that_are_too_large_are_not_computed(text: str) -> None:
    with pytest.raises(TooMuch):
        is_same_value(expression(text), expression(text))


def test_all_computation_for_one_answer_shares_a_limit() -> None:
    sines = expression("+".join(rf"\sin({number}x+e^{{{number}}})" for number in range(1, 60)))
    with bounded_work(), pytest.raises(TooMuch):
        for _ in range(1_000):
            is_same_value(sines, sines)


@pytest.mark.parametrize(
    ("answer", "expected", "ratio"),
    [("2y-4x", "y-2x", Fraction(2)), ("x-y", "y-x", Fraction(-1)), ("x^2-y", "x-y", None), ("x+y+1", "x+y", None)],
)
def test_a_constant_ratio_is_found(answer: str, expected: str, ratio: Fraction | None) -> None:
    assert constant_ratio(expression(answer), expression(expected)) == ratio


def test_rational_numbers_are_recognized() -> None:
    assert is_rational(expression(r"\sqrt{\frac{4}{9}}"))
    assert not is_rational(expression(r"\sqrt{2}"))
    assert approximation(expression(r"\frac{1}{3}")) == Fraction(1, 3)
    assert approximation(expression(r"\sqrt{-2}")) is None
