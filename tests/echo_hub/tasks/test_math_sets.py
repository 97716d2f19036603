import pytest

from echo_hub.tasks.math_reader import read
from echo_hub.tasks.math_sets import is_same_set, real_set


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (r"(-\infty,3)\cup(3,\infty)", r"x \ne 3", True),
        (r"\mathbb{R}\setminus\{1,2\}", "x<1 or 1<x<2 or x>2", True),
        (r"[0,2]\cup[1,3]", "[0,3]", True),
        (r"(0,1)\cup(1,2)", "(0,2)", False),
        (r"(0,1]\cup(1,2)", "0<x<2", True),
        (r"[0,2]\cap[1,3]", r"1 \le x \le 2", True),
        ("x>1 and x<4", "(1,4)", True),
        ("x>1", "y>1", False),
        (r"(0,\sqrt{2})", r"(0,\sqrt{2}+10^{-20})", False),
        (r"x \in \{2\}", "[2,2]", True),
    ],
)
def test_sets_are_compared_by_their_elements(one: str, other: str, is_same: bool) -> None:
    mine, theirs = real_set(read(one)), real_set(read(other))
    assert mine is not None
    assert theirs is not None
    assert is_same_set(mine, theirs) is is_same


@pytest.mark.parametrize("text", ["x+1", "a<x<b", "x<y", "(2,-3]", "x>1 or y>1", "x<x<1", "x=y"])
def test_text_that_is_no_set_of_numbers_gives_none(text: str) -> None:
    assert real_set(read(text)) is None
