"""The answer within a completion."""

from __future__ import annotations

import re
from typing import Final

_TAGGED: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_answer(completion: str) -> str:
    """The last `<answer>...</answer>`, or the whole completion where there is none; without white space around it."""
    tagged = _TAGGED.findall(completion)
    return str(tagged[-1] if tagged else completion).strip()
