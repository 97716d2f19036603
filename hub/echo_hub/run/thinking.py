"""Remove a model's reasoning, written as `<think>...</think>` by Qwen3, DeepSeek-R1 and many others."""

from __future__ import annotations

from typing import Final

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


def without_thinking(text: str, *, is_open: bool = False) -> str:
    """Return the text without its reasoning. Return "" if a reasoning block is not closed: the text then contains no
    answer.

    If `is_open`, the block began before the text: some chat templates open it. Runs in linear time.
    """
    kept: list[str] = []
    place = 0
    if not is_open:
        # Without an earlier opening tag, everything before a closing tag is reasoning.
        close, opened = text.find(CLOSE), text.find(OPEN)
        is_open = close >= 0 and (opened < 0 or close < opened)
    while True:
        if is_open:
            close = text.find(CLOSE, place)
            if close < 0:
                return ""
            place = close + len(CLOSE)
        opened = text.find(OPEN, place)
        if opened < 0:
            return "".join([*kept, text[place:]])
        kept.append(text[place:opened])
        place, is_open = opened + len(OPEN), True


def ends_in_thought(text: str) -> bool:
    """Return True if a reasoning block is open at the end of the text."""
    return text.rfind(OPEN) > text.rfind(CLOSE)
