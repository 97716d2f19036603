import pytest

from echo_hub.tasks.math_equality import AnswerComparison
from echo_hub.tasks.math_forms import Form
from echo_hub.tasks.math_reader import read


@pytest.mark.parametrize(
    ("answer", "expected", "is_same"),
    [
        ("5", "x=5", True),
        ("x-5=0", "x=5", False),
        ("2y=4x+2", "y=2x+1", False),
        ("y-2x-1=0", "y=2x+1", True),
        ("2x^2+2y^2=2", "x^2+y^2=1", True),
        ("x=2", "2x+3=7", False),
        ("y<3-x", "x+y<3", True),
        ("x+y>3", "x+y<3", False),
        ("(2,3)", "x=2, y=3", True),
        ("(3,2)", "x=2, y=3", False),
        ("r=3, s=4", "(3,4)", True),
        (r"\begin{pmatrix}1&2\end{pmatrix}", "(1,2)", False),
        (r"500x\text{ cm}", r"5x\text{ m}", True),
        (r"5x\text{ cm}", r"5x\text{ m}", False),
        ("2+3=5=5x", "5x", False),
        ("a<x<b", "a<x<b", True),
        ("b>x>a", "a<x<b", True),
        ("b<x<a", "a<x<b", False),
    ],
)
def test_answers_are_compared_by_their_meaning(answer: str, expected: str, is_same: bool) -> None:
    assert AnswerComparison(form=None, question="").is_same(read(answer), read(expected)) is is_same


def test_a_unit_may_be_asked_for() -> None:
    comparison = AnswerComparison(form=Form.UNIT, question="")
    assert comparison.is_same(read(r"5\pi\text{ cm}"), read(r"5\pi\text{ cm}"))
    assert not comparison.is_same(read(r"5\pi"), read(r"5\pi\text{ cm}"))
