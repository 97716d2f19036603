from __future__ import annotations

import json
import random

import pytest

from echo_hub.openai.reply_calls import ReadCall, ReplyCalls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'


def read(text: str, *, in_thought: bool = False, seed: int = 0) -> tuple[str, tuple[ReadCall, ...]]:
    """Read a reply in parts of random length. Return its content and its calls."""
    parts, calls, shown = random.Random(seed), ReplyCalls(in_thought=in_thought), ""
    while text:
        count = parts.randint(1, 9)
        piece = calls.add(text[:count])
        shown += piece
        text = text[count:]
    rest, found = calls.end()
    return shown + rest, found


@pytest.mark.parametrize("seed", range(20))
def test_calls_are_read_from_any_parts(seed: int) -> None:
    content, calls = read(f"I add.\n\n{CALL}\n{OTHER}\n", seed=seed)
    assert content == "I add."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 1, "b": "é"}), ("stop", {})]
    assert calls[0].call_id != calls[1].call_id and calls[0].body()["type"] == "function"


@pytest.mark.parametrize(
    "text",
    [
        "No call at all. ",
        "1 < 2 and <tool",
        "<tool_call>{broken}</tool_call>",
        f"{CALL} and <tool_call>cut of",
        "<tool_call>[]</tool_call>",
        "  \n",
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_other_replies_stay_text_to_the_last_character(text: str, seed: int) -> None:
    assert read(text, seed=seed) == (text, ())


@pytest.mark.parametrize("seed", range(5))
def test_calls_in_reasoning_do_not_count(seed: int) -> None:
    thought = f"<think>Shall I {CALL}?</think>\n"
    assert read(thought + "No.", seed=seed) == (thought + "No.", ())
    content, calls = read(thought + OTHER, seed=seed)
    assert content == thought.rstrip() and [call.name for call in calls] == ["stop"]
    opened = f"Shall I {CALL}?</think>\nNo."
    assert read(opened, in_thought=True, seed=seed) == (opened, ())
    assert read(f"I think of {CALL}", in_thought=True, seed=seed)[1] == ()


def test_text_before_a_call_is_shown_at_once() -> None:
    calls = ReplyCalls()
    assert calls.add("I add.\n") == "I add." and calls.add("<tool") == "" and calls.add("s>") == "\n<tools>"
    assert calls.add(CALL[:30]) == "" and calls.add(CALL[30:]) == ""
