"""Prompts for measurements in a run without a task: 16 requests about each of 16 subjects.

The rounding differences between engines depend on the prompts, so the prompts vary in wording and length.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.run.base_model import PromptCodec

_REQUESTS: Final = (
    "Explain {}.",
    "What is the history of {}?",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Why do people care about {}?",
    "Describe {} to a child.",
    "Write a poem about {} in four lines.",
    "Compare {} with its opposite.",
    "What should everybody know about {}? Give reasons, step by step.",
    "Write a Python function that has to do with {}.",
    "Ask me three questions about {}.",
    "Translate a sentence about {} into French.",
    "How would you measure {}?",
    "Invent a proverb about {}.",
    "Which numbers are connected with {}? Calculate an example.",
    "Write a letter of complaint about {}.",
)
_SUBJECTS: Final = (
    "rain",
    "bridges",
    "prime numbers",
    "bread",
    "sleep",
    "the moon",
    "taxes",
    "violins",
    "bacteria",
    "railways",
    "chess",
    "glass",
    "deserts",
    "elections",
    "compilers",
    "honey",
)


def plain_prompts(codec: PromptCodec) -> list[NDArray[np.int32]]:
    """Return 256 token-id prompts. Neighbours in the list differ in request and subject."""
    size = len(_SUBJECTS)
    pairs = ((turn, (turn + shift) % size) for shift in range(size) for turn in range(len(_REQUESTS)))
    return [codec.encode_prompt(_REQUESTS[request].format(_SUBJECTS[subject])) for request, subject in pairs]
