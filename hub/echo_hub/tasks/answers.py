"""The answer within a completion."""

from __future__ import annotations

from typing import Final

_OPEN: Final = "<answer>"
_CLOSE: Final = "</answer>"


def extract_answer(completion: str) -> str:
    """The last `<answer>...</answer>`, or the whole completion where there is none; without white space around it.

    In time that grows with the length alone: strangers write thousands of tags that none closes, at which a regular
    expression looks to the end from each.
    """
    answer, position = completion, 0
    while (begin := completion.find(_OPEN, position)) >= 0:
        begin += len(_OPEN)
        end = completion.find(_CLOSE, begin)
        if end < 0:
            break
        answer, position = completion[begin:end], end + len(_CLOSE)
    return answer.strip()
