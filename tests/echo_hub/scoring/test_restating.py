from __future__ import annotations

import time

import pytest

from echo_hub.scoring.restating import restated


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("The sum is 20.", "20"),
        ("12 + 8 = 20", "20"),
        ("So we get\n\n\\boxed{3/4}.", "3/4"),
        ("It is **blue**, as the sky is.", "blue"),
        ("Paris\n\nIt lies on the Seine.", "Paris"),
        ("First some working.\nAnswer: the fox", "the fox"),
        ("That makes 1,234,567 people.", "1234567"),
        ("<answer>The answer is -3.5.</answer>", "-3.5"),
        ("<answer> 7", "7"),
    ],
)
def test_the_answer_is_restated_with_tags_and_without(completion: str, answer: str) -> None:
    forms = restated(completion)
    assert {answer, f"<answer>{answer}</answer>"} <= set(forms)
    assert len(forms) == len(set(forms)) and completion not in forms


@pytest.mark.parametrize("completion", ["", " \n ", "...", "**"])
def test_completions_without_statements_restate_nothing(completion: str) -> None:
    assert restated(completion) == []


def test_a_bare_answer_is_restated_in_tags_alone() -> None:
    assert restated("20") == ["<answer>20</answer>"]


@pytest.mark.parametrize("piece", ["<answer>", "**", "\\boxed{", "is ", "1,", "= ", "\n"])
def test_a_hostile_completion_takes_no_time(piece: str) -> None:
    began = time.perf_counter()
    restated(piece * 50_000)
    assert time.perf_counter() - began < 1.0
