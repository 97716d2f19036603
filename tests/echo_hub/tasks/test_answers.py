import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.tasks.answers import extract_answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("  42\n", "42"),
        ("", ""),
        ("Well: <answer> 42 </answer>.", "42"),
        ("<answer>1</answer> No: <answer>\na\nb\n</answer> done", "a\nb"),
        ("<answer>1</answer> or <answer></answer>", ""),
        ("Well: <answer> unfinished", "unfinished"),
        ("<answer>1</answer> or <answer>2", "1"),
    ],
)
def test_the_last_tagged_answer_counts_else_the_whole_text(completion: str, answer: str) -> None:
    assert extract_answer(completion) == answer


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "a", "\n", "<", "<answer", "</answer"])).map("".join))
def test_it_is_what_a_regular_expression_finds(completion: str) -> None:
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    open_ended = completion.rpartition("<answer>")[2]
    assert extract_answer(completion) == (found[-1] if found else open_ended).strip()


def test_a_million_tags_that_none_closes_are_read_once() -> None:
    """Looking to the end from each would take days."""
    tags = "<answer>" * 1_000_000
    assert extract_answer(tags) == ""
    assert extract_answer(f"{tags}1</answer>") == f"{tags}1".removeprefix("<answer>")
