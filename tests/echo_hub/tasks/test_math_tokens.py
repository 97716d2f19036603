import pytest

from echo_hub.tasks.math_tokens import DEEPEST, LONGEST, Call, NotUnderstood, Token, TokenKind, key, nodes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\binom52", r"\binom{5}{2}"),
        (r"x^{2}", "x^2"),
        (r"\sqrt{2}", "sqrt(2)"),
        (r"\text{min}(a,b)", r"\min(a,b)"),
        (r"a \equiv 2 \pmod 5", r"a\equiv2\pmod{5}"),
        ("{x}+1", "x+1"),
        (r"A \to B", r"A\rightarrow B"),
        ("1, 2, ...", r"1,2,\dots"),
    ],
)
def test_texts_that_differ_in_settings_have_the_same_key(one: str, other: str) -> None:
    assert key(nodes(one)) == key(nodes(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\frac{a}{bc}", r"\frac{ab}{c}"),
        ("x^{12}", "x^{1}2"),
        ("1 2", "12"),
        ("x_1", "x^1"),
        ("f'", "f"),
        (r"\vec{x}", "x"),
        ("(1,2)", "[1,2]"),
        ("X+x", "x+X"),
    ],
)
def test_other_texts_have_other_keys(one: str, other: str) -> None:
    assert key(nodes(one)) != key(nodes(other))


def test_commands_hold_their_arguments() -> None:
    (fraction,) = nodes(r"\frac{x}{2}")
    assert isinstance(fraction, Call)
    assert fraction.arguments == ((Token(TokenKind.LETTER, "x"),), (Token(TokenKind.NUMBER, "2"),))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "}",
        r"\frac{1}",
        "x^",
        r"\sqrt",
        r"\sqrt13",
        r"\frac1234",
        "(" * (DEEPEST + 1),
        "{" * (DEEPEST + 1) + "}" * (DEEPEST + 1),
        r"\sqrt" * (DEEPEST + 5) + "2",
        "1" * (LONGEST + 1),
    ],
)
def test_incomplete_text_is_not_read(text: str) -> None:
    with pytest.raises(NotUnderstood):
        nodes(text)
