from __future__ import annotations

import pytest

from echo_hub.run.thinking import ends_in_thought, without_thinking


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("42", "42"),
        ("", ""),
        ("<think>4 or 2?</think>42", "42"),
        ("<think></think>\n\n42", "\n\n42"),
        ("Well: <think>hm</think>42 <think>sure</think>!", "Well: 42 !"),
        ("hm</think>42", "42"),
        ("<think>42", ""),
        ("42 <think>or not", ""),
        ("<think>a</think>42<think>b", ""),
        ("<think>a<think>b</think>42", "42"),
        ("a</think>b</think>c", "b</think>c"),
        ("<THINK>a</THINK>42", "<THINK>a</THINK>42"),
    ],
)
def test_thoughts_are_left_out(text: str, left: str) -> None:
    assert without_thinking(text) == left


@pytest.mark.parametrize(
    ("text", "left"), [("so</think>42", "42"), ("42", ""), ("", ""), ("<think>so</think>42", "42")]
)
def test_a_thought_may_have_been_opened_before(text: str, left: str) -> None:
    assert without_thinking(text, is_open=True) == left


def test_a_strangers_tags_take_no_long_time() -> None:
    assert without_thinking("<think>" * 300_000) == ""
    assert without_thinking("<think></think>" * 300_000) == ""


def test_an_open_thought_is_recognised() -> None:
    assert ends_in_thought("a<think>\n") and not ends_in_thought("<think>\n\n</think>\n\n") and not ends_in_thought("a")
