import pytest

from echo_hub.tasks.math_settings import without_settings


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"\mathbf{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\displaystyle\dfrac{1}{2}", r"\frac {1}{2}"),
        (r"\textcolor{red}{5}", "5"),
        (r"\color{red} 5", "5"),
        (r"\boxed{\underline{5}}", "5"),
        (r"\left( 1, 2 \right]", "( 1, 2  ]"),
        (r"\left.x\right|", "x |"),
        (r"3\mathbf{i}-2\bm{j}", r"3\mathbf{i}-2\mathbf{j}"),
        ("2√13", r"2\sqrt{13}"),
        ("√(x+1)", r"\sqrt(x+1)"),
        ("x¹²", "x^{12}"),
        ("x₁", "x_{1}"),
        ("½x", r"\frac{1}{2}x"),
        ("𝑥+𝟑", "x+3"),
        ("（１，２）", "(1,2)"),
        (r"90^{\circ}", "90°"),
        ("x <= 2", r"x \le  2"),
        (r"1\,234{,}567", "1234567"),
        ("**Answer:** 5", "Answer: 5"),
        ("`x+1`", "x+1"),
        ("\\frac{1}{2}\\", r"\frac{1}{2}"),
    ],
)
def test_settings_are_taken_off(text: str, plain: str) -> None:
    assert without_settings(text) == plain


@pytest.mark.parametrize(
    "text",
    ["2**3**2", "f'(x)", r"\vec{x}", r"\hat{x}", r"\mathbb{R}", r"\langle 1, 2 \rangle", r"\{1,2\}", "x_1", "5!"],
)
def test_meaningful_text_stays(text: str) -> None:
    assert without_settings(text) == text


@pytest.mark.parametrize("part", ["{", "}", r"\mathbf{", r"\color{", "**", "`", "√", "²", "\\", r"\,1", "1,234"])
def test_a_hundred_thousand_settings_are_fast(part: str) -> None:
    assert isinstance(without_settings(part * (100_000 // len(part))), str)
