from __future__ import annotations

import random

from scripts.small_base.lessons import Knights, Lesson, worked_sum
from scripts.small_base.tokenizer import CONTEXT, build_tokenizer


def test_digits_and_signs_are_tokens_of_their_own_and_words_are_few() -> None:
    teacher, rng = Knights(), random.Random(0)
    lessons: list[Lesson] = [teacher(rng, 0.0) for _ in range(200)]
    tokenizer = build_tokenizer(lesson.prompt + lesson.completion for lesson in lessons)
    assert len(tokenizer) <= 512 and tokenizer.model_max_length == CONTEXT
    sums = worked_sum(rng, 0.0)
    assert len(tokenizer.encode(sums.prompt)) == len(sums.prompt)
    assert len(tokenizer.encode("#@-$.*+UDLRLLUU")) == 15, "a board's cells and moves"
    for lesson in lessons:
        ids = tokenizer.encode(lesson.prompt)
        assert len(ids) < len(lesson.prompt) / 3
        assert tokenizer.decode(ids) == lesson.prompt
