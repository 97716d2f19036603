"""The answer within a completion."""

from __future__ import annotations

from typing import Final

_OPEN: Final = "<answer>"
_CLOSE: Final = "</answer>"


def tagged_answer(completion: str) -> str | None:
    """The last `<answer>...</answer>`, or what follows the last `<answer>` where none is closed; without white space
    around it. None where there is no tag.

    In time that grows with the length alone: strangers write thousands of tags that none closes, at which a regular
    expression looks to the end from each.
    """
    answer, position = None, 0
    while (begin := completion.find(_OPEN, position)) >= 0:
        begin += len(_OPEN)
        end = completion.find(_CLOSE, begin)
        if end < 0:
            break
        answer, position = completion[begin:end], end + len(_CLOSE)
    if answer is None and _OPEN in completion:
        answer = completion[completion.rindex(_OPEN) + len(_OPEN) :]
    return None if answer is None else answer.strip()


def extract_answer(completion: str) -> str:
    """The `tagged_answer`, or the whole completion, without white space around it, where there is none."""
    answer = tagged_answer(completion)
    return completion.strip() if answer is None else answer
