"""What a model thinks before it answers: `<think>...</think>`, as Qwen3, DeepSeek-R1 and many others write it."""

from __future__ import annotations

from typing import Final

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


def without_thinking(text: str, *, is_open: bool = False) -> str:
    """The text without what is thought; empty where a thought is not closed, for then there is no answer.

    `is_open`: the thought was opened before the text begins, as some chat templates do. In time that grows with the
    length alone.
    """
    kept: list[str] = []
    place = 0
    if not is_open:
        # Whoever closes a thought that was never opened has thought until then.
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
    """Whether a thought is open at the end of the text."""
    return text.rfind(OPEN) > text.rfind(CLOSE)
