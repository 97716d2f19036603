"""Find the answer within a completion."""

from __future__ import annotations

import itertools
import re
from typing import Final

_OPEN: Final = "<answer>"
_CLOSE: Final = "</answer>"
# The lookahead changes no match. It makes the search twice as fast in texts with many announcements that never end.
_ANNOUNCEMENT: Final = re.compile(
    r"\b(?:answer|result|solution)(?: to [^\n]{1,80}?(?=[ \t*:=i]))?(?:[ \t*]{0,4}(?:\bis\b|=|:)){1,2}\**",
    re.IGNORECASE,
)
_END_OF_SENTENCE: Final = re.compile(r"[.!?;](?=\s|$)|\n")
_UNSURE: Final = re.compile(
    r"\b(?:or|either|neither|nor|not|never|maybe|perhaps|possibly|probably|if|unless|whether|doubt|wrong|incorrect"
    r"|could|might|may)\b|n't\b",
    re.IGNORECASE,
)
_WRAPPERS: Final = (("**", "**"), ("*", "*"), ("`", "`"), ("$", "$"), ("\\(", "\\)"), ("\\boxed{", "}"), ('"', '"'))
_MOST_WRAPPED: Final = 4
_SENTENCE_CHARACTERS: Final = 300
"""Number of characters before an announcement (such as "the answer is") in which words of doubt count."""


def tagged_answer(completion: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`, without surrounding blanks. Return None if there is no
    tag.

    If no tag is closed, return the text after the last `<answer>`. Runs in linear time. A hostile completion may hold
    thousands of unclosed tags, and a regular expression would scan from each of them to the end.
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
    """Return the content of the last `<answer>` tag. If there is no tag, return the whole completion, without
    surrounding blanks."""
    answer = tagged_answer(completion)
    return completion.strip() if answer is None else answer


def announced_answer(completion: str, reference: str) -> tuple[str, ...]:
    """Return the answer that ends a completion without tags, such as `The answer is 20.`: verbatim, then unwrapped.

    The answer is all text after the last announcement. Returns () if there is none, or if the answer is ambiguous. It
    is ambiguous if an earlier announcement gives another answer, or if the sentence or the answer contains a word of
    doubt (`or`, `not`, `maybe`) that the `reference` answer lacks.
    """
    found = list(_ANNOUNCEMENT.finditer(completion))
    if not found:
        return ()
    answers = _unwrapped(completion[found[-1].end() :].strip())
    before = completion[max(0, found[-1].start() - _SENTENCE_CHARACTERS) : found[-1].start()]
    sentence = _END_OF_SENTENCE.split(before)[-1]
    if not answers or _doubts(sentence) or _doubts(answers[0]) - _doubts(reference):
        return ()
    for one, following in itertools.pairwise(found):
        claim = _END_OF_SENTENCE.split(completion[one.end() : following.start()].strip(), maxsplit=1)[0]
        if _unwrapped(claim)[-1:] != answers[-1:]:
            return ()
    return answers


def _doubts(text: str) -> set[str]:
    return {word.lower() for word in _UNSURE.findall(text)}


def _unwrapped(text: str) -> tuple[str, ...]:
    """Return the text, then shorter and shorter forms of it. Each step removes a final full stop and one pair of
    wrappers, such as quotation marks."""
    forms = dict.fromkeys([text] if text else [])
    for _ in range(_MOST_WRAPPED):
        inner = text.removesuffix(".").strip()
        for opening, closing in _WRAPPERS:
            if inner.startswith(opening) and inner.endswith(closing) and len(inner) > len(opening) + len(closing):
                inner = inner[len(opening) : -len(closing)].strip()
                break
        if inner == text or not inner:
            break
        text = inner
        forms[text] = None
    return tuple(forms)
