"""Whether two answers are equal as mathematics, by math-verify.

Its own time limits are off: they use signals, and scorers have a limit of their own (`echo_hub.scoring.pool`).
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Final

from echo_hub.tasks.answers import extract_answer

_CACHED: Final = 4_096


def is_equal(completion: str, expected: str) -> bool:
    r"""Whether the answer in `completion` is `expected`; this and a tagged answer may be LaTeX without dollar signs.

    The answer is looked for in the last `<answer>...</answer>`, else in all of the text, where math-verify takes what
    is in `\boxed{}` (several make a set), else what follows words such as "the final answer is", else the last formula,
    else the last number. Raises ValueError where `expected` is no mathematics.
    """
    from math_verify import verify

    answer = extract_answer(completion)
    found = [*_parse(answer), *(_parse(_as_formula(answer)) if "</answer>" in completion else ())]
    return bool(verify(_expected(expected), found, timeout_seconds=None))


@lru_cache(_CACHED)
def _expected(answer: str) -> list[Any]:
    parsed = _parse(_as_formula(answer))
    if not parsed:
        raise ValueError(f"math-verify finds no mathematics in the answer {answer!r}")
    return parsed


def _as_formula(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def _parse(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns of the time limits that are off.
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed: list[Any] = parse(text, extraction_config=targets, parsing_timeout=None)
    return parsed
