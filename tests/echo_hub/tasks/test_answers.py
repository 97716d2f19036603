import pytest

from echo_hub.tasks.answers import extract_answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("  42\n", "42"),
        ("", ""),
        ("Well: <answer> 42 </answer>.", "42"),
        ("<answer>1</answer> No: <answer>\na\nb\n</answer> done", "a\nb"),
        ("<answer>1</answer> or <answer></answer>", ""),
        ("<answer>unfinished", "<answer>unfinished"),
    ],
)
def test_the_last_tagged_answer_counts_else_the_whole_text(completion: str, answer: str) -> None:
    assert extract_answer(completion) == answer
