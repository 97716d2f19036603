"""Write the answer in a completion in other forms. So a wrong answer can be told from a right answer in a wrong form.

For example, `The sum is 20.` contains the answer 20. A scorer may accept `20` or `<answer>20</answer>` but not the
sentence.
"""

from __future__ import annotations

import re
from typing import Final

from echo_hub.tasks.answers import tagged_answer

MOST_CHARACTERS: Final = 20_000
"""Number of characters at a completion's end that are searched for answers."""
_NUMBER: Final = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")
_BOXED: Final = re.compile(r"\\boxed\{([^{}]{1,200})\}")
_BOLD: Final = re.compile(r"\*\*([^*\n]{1,200})\*\*")
_ANNOUNCED: Final = re.compile(r"(?:\banswer(?: is|:)|=|\bis)[ \t]*([^\n=]{1,200})", re.IGNORECASE)
_AROUND: Final = " \t\r\n.:;,!*$`\"'"


def restated(completion: str) -> list[str]:
    """Return the answers that a completion may contain, each as plain text and in `<answer>` tags. A text that equals
    the completion is left out."""
    tagged = tagged_answer(completion)
    text = (completion if tagged is None else tagged)[-MOST_CHARACTERS:]
    lines = [line for line in text.splitlines() if line.strip()]
    meant = [
        *([tagged] if tagged is not None else []),
        *_BOXED.findall(text)[-1:],
        *_BOLD.findall(text)[-1:],
        *_ANNOUNCED.findall(text)[-1:],
        *[number.replace(",", "") for number in _NUMBER.findall(text)[-1:]],
        *lines[-1:],
        *lines[:1],
    ]
    answers = dict.fromkeys(answer for one in meant if (answer := one.strip(_AROUND)))
    forms = [form for answer in answers for form in (answer, f"<answer>{answer}</answer>")]
    return [form for form in forms if form != completion.strip()]
