from __future__ import annotations

import pytest

from echo_hub.tasks.components import Format, Length, Tagged


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<think>a\nb</think><answer>3</answer>", 1),
        ("  \n<think></think><answer>3</answer>\n", 1),
        ("<think>a</think><answer>3</answer>.", 0),
        ("<answer>3</answer>", 0),
        ("", 0),
    ],
)
def test_the_pattern_has_to_match_the_whole_completion(completion: str, value: float) -> None:
    pattern = r"<think>.*</think>\s*<answer>\d+</answer>"
    assert Format.of(pattern).value(completion, 1) == value


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<answer>3</answer>", 1),
        ("so <answer>\n3 </answer>, done", 1),
        ("<answer>3", 0),
        ("</answer>3<answer>", 0),
        ("<answer> </answer>", 0),
        ("<answer>3</answer><answer>4</answer>", 0),
        ("<answer>3</answer></answer>", 0),
        ("3", 0),
        ("<answer>" * 100_000, 0),
    ],
)
def test_exactly_one_tagged_answer_earns_the_component(completion: str, value: float) -> None:
    assert Tagged("answer").value(completion, 1) == value


def test_length_is_a_plateau_with_two_slopes() -> None:
    plateau = Length(least=10, most=20, zero=40)
    assert [plateau.value("", n) for n in (0, 5, 10, 20, 30, 40, 1_000)] == [0, 0.5, 1, 1, 0.5, 0, 0]
    assert [Length(most=10).value("", n) for n in (1, 10, 15, 20)] == [1, 1, 0.5, 0]
    assert [Length(least=4).value("", n) for n in (1, 4, 10**6)] == [0.25, 1, 1]
