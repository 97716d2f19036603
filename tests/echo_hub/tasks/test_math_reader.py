import pytest
from sympy import Integer, Symbol

from echo_hub.tasks.math_reader import Exact, Grid, Measured, RealInterval, Relation, Sets, Several, read
from echo_hub.tasks.math_tokens import NotUnderstood

ONE, TWO, x = Integer(1), Integer(2), Symbol("x")
IS_ONE, IS_TWO = Relation((x, ONE), ("=",)), Relation((x, TWO), ("=",))


@pytest.mark.parametrize(
    ("text", "item"),
    [
        ("1, 2", Several("list", (ONE, TWO))),
        ("1 or 2", Several("list", (ONE, TWO))),
        (r"\{1, 2\}", Several("set", (ONE, TWO))),
        (r"\{\}", Several("set", ())),
        ("(1, 2)", Several("tuple", (ONE, TWO))),
        (r"\langle 1, 2\rangle", Several("tuple", (ONE, TWO))),
        ("1:2", Several("ratio", (ONE, TWO))),
        ("[1, 2)", RealInterval(ONE, TWO, has_low=True, has_high=False)),
        (r"(-\infty, 2]", RealInterval(None, TWO, has_low=False, has_high=True)),
        (r"\mathbb{R}", RealInterval(None, None, has_low=False, has_high=False)),
        ("all real numbers", RealInterval(None, None, has_low=False, has_high=False)),
        ("x = 1", Relation((x, ONE), ("=",))),
        (r"1 < x \le 2", Relation((ONE, x, TWO), ("<", r"\le"))),
        ("x < 1 or x > 2", Sets("or", (Relation((x, ONE), ("<",)), Relation((x, TWO), (">",))))),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", Grid(((ONE,), (TWO,)))),
        (
            r"\begin{cases} x=1 \\ x=2 \end{cases}",
            Several("list", (Relation((x, ONE), ("=",)), Relation((x, TWO), ("=",)))),
        ),
        (r"x\text{ cm}^2", Measured(x, "cm^2")),
        ("2516_8", Exact("base", ("2516", "8"))),
        ("4:30 p.m.", Exact("time", (4, 30, 0, "p"))),
        ("10 R 3", Exact("division", (10, 3))),
        (r"-\infty", Exact("infinity", ("-",))),
        (r"\pm x", Several("list", (x, -x))),
    ],
)
def test_an_answer_is_read_whole(text: str, item: object) -> None:
    assert read(text) == item


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1,,2",
        "1, 2, \\ldots",
        "[0, \\infty]",
        "(\\infty, 1)",
        "]0,1[",
        "(1, 2) or [3, 4]",
        r"\pm 1 \pm 2",
        r"(0,1) \cup (2,3) \cap (4,5)",
        r"\begin{cases} x & x > 0 \\ 0 & x \le 0 \end{cases}",
        r"\begin{pmatrix}1&2\\3\end{pmatrix}",
        r"a \equiv 2 \pmod 5",
        "7/2 = 3 R 2",
        "It is 5",
    ],
)
def test_other_texts_are_not_understood(text: str) -> None:
    with pytest.raises(NotUnderstood):
        read(text)
