import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.tasks.answers import announced_answer, extract_answer


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
def test_extraction_equals_a_regular_expressions(completion: str) -> None:
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    open_ended = completion.rpartition("<answer>")[2]
    assert extract_answer(completion) == (found[-1] if found else open_ended).strip()


def test_a_million_unclosed_tags_are_scanned_once() -> None:
    """Check the time: a regular expression that searches from each tag to the end takes days."""
    tags = "<answer>" * 1_000_000
    assert extract_answer(tags) == ""
    assert extract_answer(f"{tags}1</answer>") == f"{tags}1".removeprefix("<answer>")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("The answer is 20.", "20"),
        ("12 + 8 = 20, so the final answer is: **20**", "20"),
        ("**Answer:** 20", "20"),
        ("Answer: `20`.", "20"),
        ("The answer to 12 + 8 is $20$.", "20"),
        ("The result is \\boxed{20}.", "20"),
        ("I add.\n\nThe answer is:\n1 2\n3 4\n", "1 2\n3 4"),
        ("The answer is 20. So the answer is 20.", "20"),
        ("The solution is 3.5", "3.5"),
        ("the ANSWER is red or blue", "red or blue"),
    ],
)
def test_a_final_answer_is_recognized(completion: str, answer: str) -> None:
    assert announced_answer(completion, answer)[-1] == answer


@pytest.mark.parametrize(
    "completion",
    [
        "20",
        "It is 20.",
        "The answer is 20 or 21.",
        "The answer is either 20",
        "The answer is not 20.",
        "I doubt that the answer is 20.",
        "It isn't true that the answer is 20.",
        "If you add them, the answer is 20.",
        "The answer is 21. No: the answer is 20.",
        "Answer: 20\nAnswer: 21",
        "The answer is maybe 20.",
        "The answer is ",
        "",
    ],
)
def test_an_ambiguous_final_answer_is_not_recognized(completion: str) -> None:
    assert announced_answer(completion, "20") == ()


@pytest.mark.parametrize("behind", [" Or 21.", "\nOr 21.", " I hope that helps!", "?"])
def test_text_after_the_answer_belongs_to_it(behind: str) -> None:
    assert "20" not in announced_answer("The answer is 20." + behind, "20")


@pytest.mark.parametrize("piece", ["answer is ", "answer to ", "*", "answer", "answer is 1.", "\\boxed{", " "])
def test_announcements_by_a_stranger_take_no_time(piece: str) -> None:
    began = time.perf_counter()
    announced_answer("the answer is " + piece * 30_000, "20")
    announced_answer(piece * 30_000, "20")
    assert time.perf_counter() - began < 2.0
