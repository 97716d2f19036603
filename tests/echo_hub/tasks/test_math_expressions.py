import pytest
from sympy import Integer, Mul, Pow, Rational, Symbol

from echo_hub.tasks.math_expressions import read_expression
from echo_hub.tasks.math_tokens import NotUnderstood, nodes

x = Symbol("x")


def test_an_expression_stays_as_it_is_written() -> None:
    assert read_expression(nodes("2 \\cdot 3")) == Mul(2, 3, evaluate=False)
    assert read_expression(nodes("x^2")) == Pow(x, 2, evaluate=False)
    assert read_expression(nodes("-5")) == Integer(-5)
    assert read_expression(nodes("0.25")) == Rational(1, 4)
    assert read_expression(nodes("0.1\\overline{6}")) == Rational(1, 6)
    assert read_expression(nodes("2\\frac{1}{2}")) == Rational(5, 2)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x_{1}", "x_('1',)"),
        ("f''", "f''"),
        (r"\vec{a}", r"\vec(a)"),
        (r"\mathbf{a}", r"\vec(a)"),
        (r"\theta", r"\theta"),
        ("AB", "AB"),
    ],
)
def test_marks_are_part_of_a_name(text: str, name: str) -> None:
    assert read_expression(nodes(text)) == Symbol(name)


@pytest.mark.parametrize(
    "text",
    [
        "1/2x",
        "a/bc",
        r"\sin x/2",
        r"\sin x (x+1)",
        r"\sin(x)^2",
        "x 2",
        "2 3",
        "2^3^2",
        "--3",
        "3+-2",
        "5!!",
        "{x+1}^2",
        "2\\frac{3}{2}",
        "1e-5",
        "05",
        "(1",
        "|x",
        "||x||",
        r"x \oplus 1",
        r"\ldots",
        "x,y",
        "",
        "+",
        "hello",
        r"\sum_{k=1}^n k + 1",
        r"\sum_{k} k",
        r"\sum_{k=1}^n",
        r"\sum_{k=1}^n k (k+1)^2 / 2 + 1",
        r"\int x dx",
    ],
)
def test_ambiguous_or_invalid_expressions_are_not_read(text: str) -> None:
    with pytest.raises(NotUnderstood):
        read_expression(nodes(text))
